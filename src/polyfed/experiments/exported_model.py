"""A client's personal model as one file that runs without polyfed: a program of PyTorch's, or ONNX."""

from __future__ import annotations

import io
import logging
import warnings
from pathlib import Path

import torch
from torch.export import Dim, ExportedProgram

from polyfed.errors import ConfigError, MissingPackage, kind_and_line
from polyfed.experiments.prediction import ClientModel, load_model
from polyfed.registry import is_installed
from polyfed.report.atomic_files import write_whole

__all__ = ["export_model"]

_PACKAGES = ("onnx", "onnxscript")


def export_model(run: str | Path, client: int | str, file: str | Path, *, trust: bool = False) -> Path:
    """Write a client's personal model as a program: from inputs as the run stored them, "x", to scores, "scores".

    It holds all that the method predicts by, with the preparation of inputs, and takes any number of rows.

    Args:
        run: a finished run's folder. client: number or name.
        file: ends in `.pt2` for `torch.export.load`, or in `.onnx`.
        trust: whether code that the folder names may be imported, see `load_model`.

    Raises:
        ConfigError: see `load_model`; another file, a network that cannot be exported, or a package is not installed.
    """
    path = Path(file)
    if path.suffix not in (".pt2", ".onnx"):
        raise ConfigError(f"expected a file that ends in .pt2 or .onnx, got {path}")
    if path.suffix == ".onnx" and not all(map(is_installed, _PACKAGES)):
        raise MissingPackage("ONNX files need packages that are not installed: pip install 'polyfed[onnx]'")
    model = load_model(run, client, trust=trust)
    try:
        program = _program(model)
        content = _onnx(program) if path.suffix == ".onnx" else _pt2(program)
    except Exception as error:  # what a network does may be anything
        why = kind_and_line(error)
        raise ConfigError(
            f"client {model.client}'s model ('{model.architecture}') cannot be exported: {why}"
        ) from error
    return write_whole(path, content)


def _program(model: ClientModel) -> ExportedProgram:
    x = torch.zeros(2, *model.form.shape, dtype=model.form.dtype)
    model.scores(x)  # what is made once is made before what is recorded
    with torch.no_grad():
        return torch.export.export(model.predictor, (x,), dynamic_shapes=({0: Dim("rows")},), strict=False)


def _pt2(program: ExportedProgram) -> bytes:
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getvalue()


def _onnx(program: ExportedProgram) -> bytes:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it notes that torchvision is not there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own code
        made = torch.onnx.export(
            program, (), dynamo=True, external_data=False, verbose=False, input_names=["x"], output_names=["scores"]
        )
    assert made is not None
    content: bytes = made.model_proto.SerializeToString()
    return content
