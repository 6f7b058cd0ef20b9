"""Save with Fabric behind training and end: ``fabric_async.py NAMESPACE PATH waits|fails``."""

import sys
from importlib import import_module
from pathlib import Path

from tests.lightning.gates import Gate, GatedCheckpointIO


def main(name: str, path: Path, how: str) -> None:
    fabric_module = import_module({"lightning": "lightning.fabric"}.get(name, "lightning_fabric"))
    gate = Gate(is_open=how == "fails", failing={1} if how == "fails" else ())
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1, plugins=[GatedCheckpointIO(gate)])
    fabric.save(path, {"n": 1})
    print("end of program")
    gate.open()


main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
