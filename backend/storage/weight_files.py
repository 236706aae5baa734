"""The weight files of a Hugging Face folder, and what can be said of them by their headers."""

from __future__ import annotations

from pathlib import Path, PurePath

from backend.checked_settings import ConfigError
from backend.files import check_content, read_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = "pytorch_model*.bin"


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a folder's weights: those of its index, else the one file. Raises
    ConfigError for a file that is missing, or only a Git LFS pointer, or outside the folder.
    """
    index = folder / INDEX
    if index.exists():
        files = [_inside(folder, index, name) for name in _files_in(index)]
    elif (folder / WEIGHTS).exists():
        files = [folder / WEIGHTS]
    else:
        raise ConfigError(f"{folder} has neither {WEIGHTS} nor {INDEX}{_instead(folder)}")
    for file in files:
        check_content(file)
    return files


def check_weight_files(folder: Path) -> None:
    """Raise ConfigError for a folder whose weights are not all there, or damaged."""
    for file in weight_files(folder):
        shapes_in(file)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a folder's tensors by name. Raises ConfigError as the others do."""
    return {name: shape for file in weight_files(folder) for name, shape in shapes_in(file).items()}


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a safetensors file's tensors by name; only its header is read. Raises
    ConfigError for a file that is damaged or ends too early.
    """
    from safetensors import SafetensorError, safe_open  # `doctor` runs without packages

    try:
        with safe_open(file, "numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from error


def _files_in(index: Path) -> list[str]:
    """Return the names of the files in an index."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: weight_map is missing or empty")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{index}: weight_map must name files, got {name!r} for {tensor}")
    return sorted(set(weight_map.values()))


def _inside(folder: Path, index: Path, name: str) -> Path:
    """Return a file of an index; it may be a link, as in the cache of a hub, but its place must be
    in the folder.
    """
    path = folder / name
    inside = ".." not in PurePath(name).parts and path.parent.resolve().is_relative_to(
        folder.resolve()
    )
    if not inside:
        raise ConfigError(f"{index}: weight_map names {name!r}, which is outside the folder")
    return path


def _instead(folder: Path) -> str:
    """Return what a folder has instead of weights that are read."""
    if shards := sorted(folder.glob("*.safetensors")):
        return f": {shards[0].name} is not found without the index, so download that too"
    if pickles := sorted(folder.glob(PICKLES)):
        return (
            f": {pickles[0].name} is a pickle, which Spindle does not read. Save the model again: "
            'python -c "from transformers import AutoModelForCausalLM; '
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained('FOLDER')\""
        )
    return ""
