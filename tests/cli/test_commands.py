"""The commands as users run them: what they print, and how they exit."""

import json
import os
import re
import subprocess
import sys
from collections import OrderedDict, namedtuple
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_snapshot import cli
from lightning_snapshot.manifest import EXTENSION_KEY, DictEntry, Manifest, PrimitiveEntry, encode, seal
from lightning_snapshot.options import Options
from lightning_snapshot.save import save
from lightning_snapshot.storage import METADATA_NAME, open_storage
from tests.cli.worlds import save_by_ranks

GOLDEN = Path(__file__).parent.parent / "golden" / "data"
STATE = {
    "epoch": 3,
    "global_step": 400,
    "state_dict": OrderedDict({"fc.weight": torch.ones(2, 512), "fc.bias": torch.nn.Parameter(torch.ones(2))}),
    "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(2, 512)}}}],
    "fp8": torch.ones(4).to(torch.float8_e5m2),
    "hyper_parameters": {"lr": 0.5, "name": "run", "raw": b"\0\xff", "worst": float("inf"), "betas": (1, 2)},
}
Pair = namedtuple("Pair", ["first", "second"])  # noqa: PYI024 - a class without types is what is stored


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        self.lines = out.splitlines()

    def row(self, start: str) -> list[str]:
        """The cells of the line of a table that starts like this."""
        (line,) = [line for line in self.lines if line.startswith(start)]
        return re.split(r" {2,}", line.strip())


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: Any) -> Outcome:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in arguments])
        return Outcome(int(caught.value.code or 0), *capsys.readouterr())

    return call


def write(path: Path, state: dict[str, Any] = STATE, save_id: str = "20260101T120000-0123456789ab") -> Path:
    save(state, open_storage(path), save_id=save_id, options=Options())
    return path


def write_entries(path: Path, entries: dict[str, Any]) -> Path:
    """A snapshot as torchsnapshot could have written it."""
    path.mkdir(parents=True)
    (path / METADATA_NAME).write_bytes(encode(Manifest("0.1.0", 1, entries)))
    return path


def of_str(text: str) -> PrimitiveEntry:
    return PrimitiveEntry("str", text, replicated=False)


def data_files(path: Path) -> list[Path]:
    return sorted((path / ".data").glob("*/*"))


# --- ls ---------------------------------------------------------------------------------------------------------------


def test_ls_tells_what_a_folder_holds(tmp_path: Path, run: Any) -> None:
    write(tmp_path / "a.ckpt", save_id="20260104T120000-0123456789ab")
    whole = sum(file.stat().st_size for file in data_files(tmp_path / "a.ckpt"))
    write(tmp_path / "missing.ckpt", {"epoch": 1, "t": torch.ones(3)}, "20260103T120000-0123456789ab")
    data_files(tmp_path / "missing.ckpt")[0].unlink()
    write(tmp_path / "cut.ckpt", {"t": torch.ones(3)}, "20260102T120000-0123456789ab")
    data_files(tmp_path / "cut.ckpt")[0].write_bytes(b"x")
    (write(tmp_path / "broken.ckpt", save_id="20260101T120000-0123456789ab") / METADATA_NAME).write_bytes(b"{")
    (tmp_path / "killed.ckpt" / ".data").mkdir(parents=True)
    (tmp_path / "claimed.ckpt").mkdir()
    os.rename(write(tmp_path / "b"), tmp_path / ".snapshot-b.tmp")
    (tmp_path / "stock.ckpt").write_bytes(bytes(2048))
    (tmp_path / "sharded.ckpt").mkdir()
    (tmp_path / "sharded.ckpt" / ".metadata").touch()
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    (tmp_path / "dangling.ckpt").symlink_to("nowhere")
    (tmp_path / "hparams.yaml").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()

    found = run("ls", tmp_path)
    assert (found.code, found.err) == (0, "")
    assert found.row("name") == ["name", "status", "epoch", "step", "size", "tensors", "ranks", "age"]
    size = f"{whole / 1024:.1f} KiB"
    assert found.row("a.ckpt")[:-1] == ["a.ckpt", "complete", "3", "400", size, "4", "1"]
    assert found.row("last.ckpt")[:-1] == ["last.ckpt -> a.ckpt", "complete", "3", "400", size, "4", "1"]
    assert found.row("missing.ckpt")[:-1] == ["missing.ckpt", "incomplete", "1", "-", "0 B", "1", "1"]
    assert found.row("cut.ckpt")[:-1] == ["cut.ckpt", "damaged", "-", "-", "1 B", "1", "1"]
    nothing = ["-"] * 5
    assert found.row("broken.ckpt")[:-1] == ["broken.ckpt", "damaged", *nothing]
    assert found.row("killed.ckpt")[:-1] == ["killed.ckpt", "incomplete", *nothing]
    assert found.row("claimed.ckpt")[:-1] == ["claimed.ckpt", "incomplete", *nothing]
    assert found.row(".snapshot-b.tmp")[:-1] == [".snapshot-b.tmp", "incomplete", *nothing]
    assert found.row("sharded.ckpt")[:-1] == ["sharded.ckpt", "foreign", *nothing]
    assert found.row("stock.ckpt")[:-1] == ["stock.ckpt", "foreign", "-", "-", "2.0 KiB", "-", "-"]
    assert len(found.lines) == 11
    # By the time of the save; those without one follow.
    assert [line.split()[0] for line in found.lines[1:6]] == [
        *("broken.ckpt", "cut.ckpt", "missing.ckpt", "a.ckpt", "last.ckpt")
    ]


@pytest.mark.parametrize(("age_seconds", "text"), [(30, r"3\d s"), (150, "2 min"), (7300, "2 h"), (200_000, "2 d")])
def test_ls_tells_how_old_a_checkpoint_is(tmp_path: Path, run: Any, age_seconds: int, text: str) -> None:
    path = tmp_path / "stock.ckpt"
    path.touch()
    now = path.stat().st_mtime
    os.utime(path, (now - age_seconds, now - age_seconds))
    assert re.fullmatch(text, run("ls", tmp_path).row("stock.ckpt")[-1])


def test_ls_of_the_working_folder_needs_no_path(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.ckpt")
    monkeypatch.chdir(tmp_path)
    assert run("ls").row("a.ckpt")[1] == "complete"


def test_ls_of_snapshots_of_torchsnapshot(run: Any) -> None:
    found = run("ls", GOLDEN)
    assert found.row("w4-sharded")[1:-1] == ["complete", "-", "-", "600 B", "9", "4"]
    assert found.row("w4-dtensor-2d-main")[-3:-1] == ["1", "4"]  # one tensor in the parts of four ranks
    assert len(found.lines) == 1 + 41


def test_ls_of_a_snapshot_lists_its_top_level_keys(tmp_path: Path, run: Any) -> None:
    found = run("ls", write(tmp_path / "a.ckpt"))
    assert found.code == 0
    assert found.row("key") == ["key", "type", "size", "tensors"]
    assert found.row("epoch") == ["epoch", "int", "0 B", "0"]
    assert found.row("state_dict") == ["state_dict", "OrderedDict", "4.0 KiB", "2"]
    assert found.row("optimizer_states") == ["optimizer_states", "list", "4.0 KiB", "1"]
    assert [line.split()[0] for line in found.lines[1:]] == list(STATE)


@pytest.mark.parametrize("command", [["ls", "."], ["ls", "a.ckpt"], ["show", "a.ckpt"], ["show", "a.ckpt", "--json"]])
def test_commands_that_only_look_do_not_import_torch(tmp_path: Path, command: list[str]) -> None:
    write(tmp_path / "a.ckpt")
    program = f"""if True:
        import sys
        from lightning_snapshot.cli import main
        try:
            main({command!r})
        except SystemExit as exit:
            print(exit.code or 0, [name for name in ("torch", "lightning", "pytorch_lightning") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["0 []"], done.stderr


# --- show -------------------------------------------------------------------------------------------------------------


def test_show_prints_a_tree(tmp_path: Path, run: Any) -> None:
    path = write(tmp_path / "a.ckpt")
    found = run("show", path)
    assert found.code == 0
    betas = found.lines[-1].partition(", ")[2]
    assert found.lines[1:] == [
        "├── epoch: int 3",
        "├── global_step: int 400",
        "├── state_dict: OrderedDict (2), 4.0 KiB",
        "│   ├── fc.weight: tensor float32 [2, 512], 4.0 KiB",
        "│   └── fc.bias: parameter float32 [2], 8 B",
        "├── optimizer_states: list (1), 4.0 KiB",
        "│   └── 0: dict (1), 4.0 KiB",
        "│       └── state: dict (1), 4.0 KiB",
        "│           └── 0: dict (1), 4.0 KiB",
        "│               └── exp_avg: tensor float32 [2, 512], 4.0 KiB",
        "├── fp8: tensor float8_e5m2 [4], 4 B",
        f"└── hyper_parameters: dict (5), {betas}",
        "    ├── lr: float 0.5",
        "    ├── name: str 'run'",
        r"    ├── raw: bytes b'\x00\xff'",
        "    ├── worst: float inf",
        f"    └── betas: tuple, {betas}",
    ]
    assert re.fullmatch(rf"{re.escape(str(path))}: snapshot \(6\), \d+\.\d KiB", found.lines[0])


@pytest.mark.parametrize(
    ("key", "lines"),
    [
        ("state_dict/fc.bias", ["state_dict/fc.bias: parameter float32 [2], 8 B"]),
        ("0/state_dict/fc.bias", ["state_dict/fc.bias: parameter float32 [2], 8 B"]),
        ("optimizer_states/0/state/0", ["optimizer_states/0/state/0: dict (1), 4.0 KiB", "└── exp_avg: tensor"]),
    ],
)
def test_show_can_be_asked_for_a_part(tmp_path: Path, run: Any, key: str, lines: list[str]) -> None:
    found = run("show", write(tmp_path / "a.ckpt"), key)
    assert len(found.lines) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found.lines, lines, strict=True))


def test_a_key_that_looks_like_a_rank_is_a_key_first(tmp_path: Path, run: Any) -> None:
    path = write(tmp_path / "a.ckpt", {"0": {"x": 5}, "x": 6})
    assert run("show", path, "0/x").lines == ["0/x: int 5"]


def test_show_tells_what_a_rank_sees(run: Any) -> None:
    snapshot = GOLDEN / "w2-per-rank"
    outputs = [run("show", snapshot, "--rank", rank) for rank in (0, 1)]
    assert outputs[0].out != outputs[1].out
    key = next(iter(json.loads(run("show", snapshot, "--rank", 1, "--json").out)["items"]))["key"]
    assert run("show", snapshot, f"1/{key}").out == run("show", snapshot, key, "--rank", 1).out
    refused = run("show", snapshot, "--rank", 2)
    assert (refused.code, refused.out) == (2, "")
    assert "expected a rank from 0 to 1, found 2" in refused.err


def test_show_puts_what_a_rank_has_of_its_own_over_what_rank_0_has(tmp_path: Path, run: Any) -> None:
    long = "n" * 1200
    states = [
        {"state_dict": {"w": torch.ones(2), long: torch.ones(3)}, "rng": {"t": (torch.ones(rank + 1),), long: rank}}
        for rank in range(2)
    ]
    path = save_by_ranks(tmp_path / "a.ckpt", states, as_one=True)
    for rank in range(2):
        assert run("show", path, "--rank", rank).lines[1:] == [
            "├── state_dict: dict (2), 20 B",
            "│   ├── w: tensor float32 [2], 8 B",
            f"│   └── {long}: tensor float32 [3], 12 B",
            f"└── rng: dict (2), {4 * rank + 4} B",
            f"    ├── t: tuple (1), {4 * rank + 4} B",
            f"    │   └── 0: tensor float32 [{rank + 1}], {4 * rank + 4} B",
            f"    └── {long}: int {rank}",
        ]
        assert run("show", path, f"{rank}/rng/{long}").lines == [f"rng/{long}: int {rank}"]
        assert run("show", path, f"{rank}/state_dict/{long}").lines[0].endswith(": tensor float32 [3], 12 B")


def test_show_as_json(tmp_path: Path, run: Any) -> None:
    found = json.loads(run("show", write(tmp_path / "a.ckpt"), "--json").out)
    assert [item["key"] for item in found["items"]] == list(STATE)
    by_key = {item["key"]: item for item in found["items"]}
    assert by_key["epoch"] == {"key": "epoch", "path": "epoch", "kind": "int", "size_bytes": 0, "value": 3}
    assert by_key["state_dict"]["items"][0] == {
        "key": "fc.weight",
        "path": "state_dict/fc.weight",
        "kind": "tensor",
        "dtype": "float32",
        "shape": [2, 512],
        "size_bytes": 4096,
    }
    values = {item["key"]: item.get("value") for item in by_key["hyper_parameters"]["items"]}
    assert values == {"lr": 0.5, "name": "run", "raw": "AP8=", "worst": "inf", "betas": None}


def test_show_tells_what_containers_really_were(tmp_path: Path, run: Any) -> None:
    tensor = torch.ones(1)
    state = {"t": (tensor, 1), "n": Pair(tensor, 2), "odd": {(1, 2): tensor}, "empty": {}, "k/%": [tensor]}
    lines = run("show", write(tmp_path / "a.ckpt", state)).lines
    heads = [line[4:].partition(",")[0] for line in lines[1:] if line[0] in "├└"]
    assert heads == ["t: tuple (2)", f"n: {__name__}.Pair (2)", "odd: dict (2)", "empty: dict (0)", "k/%: list (1)"]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/.snapshot_metadata")), ids=lambda path: path.parent.name)
def test_everything_of_torchsnapshot_can_be_shown(path: Path, run: Any) -> None:
    found = run("show", path.parent)
    assert (found.code, found.err) == (0, "")
    assert len(found.lines) > 1


def test_a_missing_file_has_no_size(tmp_path: Path, run: Any) -> None:
    entry = {"0/o": {"type": "object", "location": "gone", "serializer": "torch_save", "obj_type": "builtins.set"}}
    entry["0/o"]["replicated"] = False
    path = tmp_path / "a"
    path.mkdir()
    (path / METADATA_NAME).write_text(json.dumps({"version": "0.1.0", "world_size": 1, "manifest": entry}))
    assert run("show", path).lines[1] == "└── o: set, size unknown"
    assert run("ls", path).row("o") == ["o", "set", "?", "0"]


def test_a_tree_without_end_is_not_followed(tmp_path: Path, run: Any) -> None:
    deep = {"0/" + "/".join(["d"] * depth): DictEntry(["d"]) for depth in range(1, 400)}
    found = run("show", write_entries(tmp_path / "deep", deep))
    assert found.code == 2
    assert "expected at most 200 levels of nesting" in found.err


def test_a_tree_that_leads_back_to_itself_is_shown_once(tmp_path: Path, run: Any) -> None:
    path = write(tmp_path / "a.ckpt", {"m": {"x": 1, "y": {"z": 2}}})
    metadata = json.loads((path / METADATA_NAME).read_text())
    extension = json.loads(metadata["manifest"][EXTENSION_KEY]["content"])
    extension["ranks"]["0"]["moved"] = {"m/y": "m"}
    metadata["manifest"][EXTENSION_KEY]["content"] = json.dumps(extension)
    (path / METADATA_NAME).write_bytes(seal(json.dumps(metadata).encode()))
    assert run("show", path).lines[1:] == ["└── m: dict (2), 0 B", "    ├── x: int 1", "    └── y: same as m, 0 B"]


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_says_that_all_is_well(tmp_path: Path, run: Any) -> None:
    path = write(tmp_path / "a.ckpt")
    found = run("verify", path, GOLDEN / "w1-basic-slab")
    assert (found.code, found.err) == (0, "")
    count = len(data_files(path))
    assert re.fullmatch(rf"{re.escape(str(path))}: ok, {count} files, \d+\.\d KiB in \d+\.\d s", found.lines[0])
    assert ": ok, 2 files, 2 without checksums, 0 B in " in found.lines[1]
    assert len(found.lines) == 2


def test_verify_prints_a_line_per_problem(tmp_path: Path, run: Any) -> None:
    good, bad = write(tmp_path / "good.ckpt"), write(tmp_path / "bad.ckpt")
    files = data_files(bad)
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"\x7f")
    files[-1].unlink()
    found = run("verify", bad, good)
    assert found.code == 1
    assert len(found.lines) == 3
    assert found.lines[0].startswith(f"{bad}: damaged: {files[0].relative_to(bad)}, bytes 0 to ")
    assert found.lines[1].startswith(f"{bad}: missing: {files[-1].relative_to(bad)}: expected a file, found none")
    assert found.lines[2].startswith(f"{good}: ok, ")
    assert found.err.startswith(f"{bad}: 2 problems, ")
    assert found.err.count("\n") == 1


def test_verify_goes_on_after_an_error(tmp_path: Path, run: Any) -> None:
    good, bad = write(tmp_path / "good.ckpt"), write(tmp_path / "bad.ckpt")
    data_files(bad)[0].unlink()
    found = run("verify", tmp_path / "nothing", bad, good)
    assert found.code == 2
    assert found.err.splitlines()[0] == f"lightning-snapshot: {tmp_path}/nothing: expected a snapshot, found nothing"
    assert f"{bad}: 1 problem, " in found.err
    assert len(found.lines) == 2


def test_verify_as_json(tmp_path: Path, run: Any) -> None:
    good, bad = write(tmp_path / "good.ckpt"), write(tmp_path / "bad.ckpt")
    file = data_files(bad)[0]
    file.unlink()
    found = run("verify", good, bad, tmp_path / "nothing", "--json")
    assert found.code == 2
    of_good, of_bad, of_nothing = json.loads(found.out)
    assert (of_good["path"], of_good["ok"], of_good["problems"]) == (str(good), True, [])
    assert of_good["bytes_checked"] == sum(file.stat().st_size for file in data_files(good))
    assert (of_bad["path"], of_bad["ok"]) == (str(bad), False)
    (problem,) = of_bad["problems"]
    assert (problem["kind"], problem["location"]) == ("missing", str(file.relative_to(bad)))
    assert "0/state_dict/fc.weight" in problem["tensors"]
    assert of_nothing == {
        "path": f"{tmp_path}/nothing",
        "error": f"{tmp_path}/nothing: expected a snapshot, found nothing",
    }


# --- errors, and names that others chose ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["ls", "nothing"], "nothing: expected a snapshot, found nothing"),
        (["show", "file"], "file: expected a snapshot, which is a folder with .snapshot_metadata, found a file"),
        (["show", "broken"], "broken/.snapshot_metadata: "),
        (["show", "good", "gone"], "good: expected a value 'gone', found none; top-level keys are ['epoch', "),
        (["ls", "nowhere://bucket/a"], "nowhere://bucket/a: "),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch, command: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good")
    (tmp_path / "file").touch()
    # The reason that a YAML parser gives has several lines.
    (write(tmp_path / "broken") / METADATA_NAME).write_bytes(b"a: [\n\nb: }\n")
    found = run(*command)
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("lightning-snapshot: ")
    assert message in found.err
    assert found.err.count("\n") == 1


def test_errors_of_the_system_are_one_line(tmp_path: Path, run: Any) -> None:
    found = run("ls", f"{tmp_path}/{'x' * 300}")
    assert found.code == 2
    assert found.err.startswith("lightning-snapshot: ")
    assert found.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["nonsense"], ["show"], ["ls", "--nonsense"], []])
def test_wrong_usage_is_an_error(run: Any, arguments: list[str]) -> None:
    found = run(*arguments)
    assert found.code == 2
    assert "Usage: lightning-snapshot" in found.out + found.err


def test_help_is_no_error(run: Any) -> None:
    assert run("-h").code == 0
    for command in ("ls", "show", "verify"):
        assert "Usage: lightning-snapshot " + command in run(command, "--help").out


# Markup of rich, a name of an emoji, a colour, a line break, text from right to left, a control character.
ODD = "[bold]x[red] :warning: \x1b[31m\n\u202e\x80 é漢"
SHOWN = r"[bold]x[red] :warning: \x1b[31m\n\u202e\x80 é漢"


def test_names_cannot_do_anything_to_the_terminal(tmp_path: Path, run: Any) -> None:
    key = f"{ODD}[/bold]"
    path = write(tmp_path / f"{ODD}.ckpt", {key: {key: ODD, "t": torch.ones(3)}})
    outputs = [run("ls", tmp_path), run("ls", path), run("show", path), run("verify", path), run("verify", f"{path}x")]
    assert outputs[0].row("[bold]")[:2] == [f"{SHOWN}.ckpt", "complete"]
    assert outputs[1].row("[bold]")[:2] == [f"{SHOWN}[/bold]", "dict"]
    lines = outputs[2].lines
    assert lines[0].startswith(f"{tmp_path}/{SHOWN}.ckpt: snapshot (1)")
    assert lines[1] == f"└── {SHOWN}[/bold]: dict (2), 12 B"
    assert lines[2] == f"    ├── {SHOWN}[/bold]: str {ODD!r}"
    assert outputs[3].out.startswith(f"{tmp_path}/{SHOWN}.ckpt: ok, ")
    assert f"{SHOWN}.ckptx: expected a snapshot, found nothing" in outputs[4].err
    data_files(path)[0].unlink()
    outputs.append(run("verify", path))
    assert len(outputs[5].lines) == 1
    assert f"(affects 0/{SHOWN}[%2Fbold]/t)" in outputs[5].out
    assert not any({"\x1b", "\u202e", "\x80"} & {*found.out, *found.err} for found in outputs)


@pytest.mark.parametrize(
    ("encoding", "command", "shown"),
    [("ascii", "ls", r"\xe9"), ("ascii", "show", r"\udcff.ckpt: snapshot"), ("utf-8", "verify", r"\udcff.ckpt: ok")],
)
def test_paths_may_be_no_text(tmp_path: Path, encoding: str, command: str, shown: str) -> None:
    path = write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.ckpt")), {"é": 1})
    # As a process of its own, because the encoding of the terminal takes part.
    done = subprocess.run(
        [sys.executable, "-c", "from lightning_snapshot.cli import main; main()", command, path],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert shown.encode() in done.stdout


def test_output_that_nobody_wants_is_no_traceback(tmp_path: Path) -> None:
    path = write_entries(tmp_path / "a", {f"0/{index}": of_str("x" * 50) for index in range(20_000)})
    program = "from lightning_snapshot.cli import main; main()"
    command = [sys.executable, "-c", program, "show", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


# --- installation -----------------------------------------------------------------------------------------------------


def test_the_command_is_installed_and_what_it_needs_is_an_extra() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="lightning-snapshot")
    assert script.load() is cli.main
    requirements = metadata.requires("lightning-snapshot") or []
    found = sorted(line.partition(">")[0] for line in requirements if re.search("extra == .cli.", line))
    assert found == ["rich", "typer"]


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_says_how_to_get_it(missing: str) -> None:
    program = f"""if True:
        import sys
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == {missing!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Finder())
        from lightning_snapshot.cli import main
        main(["ls"])
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "lightning-snapshot: the command line needs the packages typer and rich; install them with: "
        "pip install 'lightning-snapshot[cli]'\n"
    )


def test_other_packages_that_are_missing_are_not_taken_for_the_extra() -> None:
    program = """if True:
        import sys
        sys.modules["msgspec"] = None
        from lightning_snapshot.cli import main
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "msgspec" in done.stderr
