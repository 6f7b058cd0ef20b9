"""Object stores for fsspec, with which Lightning itself looks into folders of checkpoints.

fsspec loads this module when it needs it, and only where the packages are missing that it would take otherwise.
"""

from typing import Any

from obstore.fsspec import FsspecStore

from lightning_snapshot.storage.cloud_options import settings_for

__all__ = ["AzureFileSystem", "GoogleFileSystem", "S3FileSystem"]


class _FileSystem(FsspecStore):  # type: ignore[misc]  # obstore may not be installed where types are checked
    def __init__(self, *args: Any, **options: Any) -> None:
        settings = settings_for(self.protocol, "any", options)
        super().__init__(
            self.protocol,
            *args,
            config=settings.config,
            client_options=settings.client_options,
            retry_config=settings.retry_config or None,
            credential_provider=settings.credential_provider,
        )


class S3FileSystem(_FileSystem):
    """Amazon S3 and what is like it."""

    protocol = "s3"


class GoogleFileSystem(_FileSystem):
    """Google Cloud Storage."""

    protocol = "gs"


class AzureFileSystem(_FileSystem):
    """Azure Blob Storage."""

    protocol = "az"
