"""States for both directions. Imported by the tests and, through PYTHONPATH, by the programs with torchsnapshot."""

from collections import OrderedDict

import torch

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
DTYPES += ["complex64", "complex128"]


def training(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module and its Adam optimizer after one step."""
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 3))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01 * (seed + 1))
    module(torch.randn(4, 20)).square().sum().backward()
    optimizer.step()
    return module, optimizer


def values() -> dict:
    """Containers, keys, primitives, dtypes and objects that torchsnapshot can give back."""
    generator = torch.Generator().manual_seed(7)
    tensors = {name: (torch.randn(3, 5, generator=generator) * 20).to(getattr(torch, name)) for name in DTYPES}
    shared = torch.arange(6.0)
    return {
        "dtypes": tensors,
        "scalar": torch.tensor(3.5),
        "odd bfloat16": torch.ones(7, dtype=torch.bfloat16),
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "view": torch.arange(1000.0)[10:20],
        "tied": [shared, shared.view(6)],
        "containers": {"list": [1, [2, []], {"k": OrderedDict(b=1, a=2)}], "empty": {}, 5: "int", -3: 1},
        "odd keys": {"a/b": 1, "50%": 2, "": 3, "é中": 4, "..": 5, " ": 6, "😀": 7, "\x7f\x85": 8},
        "primitives": [0, -1, 2**80, True, 0.1, float("inf"), -0.0, "text\n\x00é😀", b"\x00\xff", ""],
        "objects": [None, (1, "a"), {1, 2}, complex(1, 2), torch.Size([2, 3]), torch.float16],
    }
