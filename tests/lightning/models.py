"""Tiny modules and data for both distributions of Lightning, and an exact comparison of what comes back.

Each class is written once, without its base, and then bound to the base of each distribution. `models` picks the right
ones for the ``namespace`` fixture.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import numpy as np
import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS_PER_EPOCH = 4
_BATCH_SIZE = 4
_FEATURES = 8


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    count = STEPS_PER_EPOCH * _BATCH_SIZE
    return TensorDataset(torch.randn(count, _FEATURES, generator=generator), torch.randn(count, 2, generator=generator))


def loader() -> DataLoader:
    return DataLoader(dataset(), batch_size=_BATCH_SIZE, shuffle=False)


class _Tiny:
    """Trains with Adam and StepLR. Logs ``val_loss``, and ``score`` as it is told, so that the best epoch is known."""

    def __init__(self, hidden: int = 4, scores: Sequence[float] = (), seed: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(_FEATURES, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 2))
        self.lr = 0.01
        self.trained_steps: list[int] = []
        self.weights_in_evaluation: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        self.trained_steps.append(self.trainer.global_step)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        if self.hparams.scores:
            self.log("score", self.hparams.scores[self.current_epoch % len(self.hparams.scores)])

    def test_step(self, batch, batch_idx):
        self.log("test_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def on_validation_start(self):
        self.weights_in_evaluation.append(self.net[0].weight.detach().clone())

    on_test_start = on_predict_start = on_validation_start

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)]

    def train_dataloader(self):
        return loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class _WithHyperparameter(_Tiny):
    """Holds any value among its hyperparameters."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class _Data:
    """A data module with hyperparameters and a state."""

    def __init__(self, batch_size: int = _BATCH_SIZE) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.epochs_seen = 0

    def train_dataloader(self):
        self.epochs_seen += 1
        return DataLoader(dataset(), batch_size=self.hparams.batch_size)

    def val_dataloader(self):
        return DataLoader(dataset(), batch_size=self.hparams.batch_size)

    def state_dict(self):
        return {"epochs_seen": self.epochs_seen, "position": torch.tensor([3, 1])}

    def load_state_dict(self, state_dict):
        self.epochs_seen = state_dict["epochs_seen"]
        self.position = state_dict["position"]


class LightningTiny(_Tiny, lightning.pytorch.LightningModule): ...


class PytorchLightningTiny(_Tiny, pytorch_lightning.LightningModule): ...


class LightningWithHyperparameter(_WithHyperparameter, lightning.pytorch.LightningModule): ...


class PytorchLightningWithHyperparameter(_WithHyperparameter, pytorch_lightning.LightningModule): ...


class LightningData(_Data, lightning.pytorch.LightningDataModule): ...


class PytorchLightningData(_Data, pytorch_lightning.LightningDataModule): ...


_MODELS = {
    "lightning": SimpleNamespace(
        Tiny=LightningTiny, WithHyperparameter=LightningWithHyperparameter, Data=LightningData
    ),
    "pytorch_lightning": SimpleNamespace(
        Tiny=PytorchLightningTiny, WithHyperparameter=PytorchLightningWithHyperparameter, Data=PytorchLightningData
    ),
}


def models(namespace_name: str) -> SimpleNamespace:
    """``Tiny``, ``WithHyperparameter`` and ``Data`` of a distribution."""
    return _MODELS[namespace_name]


def state_of(trainer: Any) -> dict[str, Any]:
    """Everything that a resumed run must have in common with one that was never interrupted."""
    return {
        "model": {name: tensor.clone() for name, tensor in trainer.lightning_module.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


def difference(found: Any, expected: Any, place: str = "") -> str | None:
    """The first place where two values differ in type or content, to the last bit; None if they are equal."""
    if type(found) is not type(expected):
        return f"{place}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        return None if _bits(found) == _bits(expected) else f"{place}: {found} instead of {expected}"
    if isinstance(expected, np.ndarray):
        same = found.dtype == expected.dtype and found.tobytes() == expected.tobytes() and found.shape == expected.shape
        return None if same else f"{place}: {found} instead of {expected}"
    if isinstance(expected, Mapping):
        if list(found) != list(expected) or [type(key) for key in found] != [type(key) for key in expected]:
            return f"{place}: keys {list(found)} instead of {list(expected)}"
        pairs = [(found[key], expected[key], f"{place}/{key}") for key in expected]
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return f"{place}: {len(found)} items instead of {len(expected)}"
        pairs = [(a, b, f"{place}/{i}") for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    else:
        both_nan = found != found and expected != expected
        return None if both_nan or found == expected else f"{place}: {found!r} instead of {expected!r}"
    return next((text for pair in pairs if (text := difference(*pair))), None)


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # numpy knows no bfloat16
    return tensor.dtype, tuple(tensor.shape), tensor.requires_grad, content.numpy().tobytes()
