"""`ResumeMixin`: the hooks of a strategy that exact resume needs, because no callback has them."""

from typing import Any, ClassVar

from lightning_snapshot.integration.resume.state import Resume
from lightning_snapshot.integration.wiring import StrategyMixin

__all__ = ["ResumeMixin"]


class ResumeMixin(StrategyMixin):
    """For all strategies that do not save in their own way.

    Attributes:
        exact_resume: Of the ``fit`` that is being run or was the last one.
    """

    replaced: ClassVar[tuple[str, ...]] = ()
    exact_resume: Resume | None = None

    def process_dataloader(self, dataloader: object) -> object:
        """Called with each loader before it is read from."""
        loader: object = super().process_dataloader(dataloader)  # type: ignore[misc]  # the strategy is the next class in line
        if self.exact_resume is not None:
            self.exact_resume.follow(loader)
        return loader

    def on_train_start(self) -> None:
        """Called after all other hooks of that name, right before the first batch is read."""
        super().on_train_start()  # type: ignore[misc]  # as above
        if self.exact_resume is not None:
            self.exact_resume.resume()

    def on_validation_end(self) -> None:
        """Called after all other hooks of that name."""
        super().on_validation_end()  # type: ignore[misc]  # as above
        if self.exact_resume is not None:
            self.exact_resume.leave_validation()

    def load_checkpoint(self, checkpoint_path: Any, **how: Any) -> Any:
        """Load a checkpoint, after the module has the precision that it will have, and had at the save."""
        if type(self.precision_plugin).__name__ == "DoublePrecision":
            # Lightning converts it only after that, when the weights have been rounded.
            self.precision_plugin.convert_module(self.lightning_module)
        return super().load_checkpoint(checkpoint_path, **how)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Called first when a checkpoint is made."""
        self.begin_save()
        state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]  # as above
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save what the strategy saves, and what exact resume needs."""
        self.complete(checkpoint, filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]  # as above

    def begin_save(self) -> None:
        """Note what must be noted before anything is asked for its state."""
        if self.exact_resume is not None:
            self.exact_resume.begin_save()

    def complete(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        """Add to a checkpoint what exact resume needs."""
        if self.exact_resume is not None:
            self.exact_resume.add_to(checkpoint, filepath)
