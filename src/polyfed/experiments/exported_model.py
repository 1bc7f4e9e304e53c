"""A client's network as one file that runs without polyfed: a program of PyTorch's, or ONNX.

It fills in what is missing in rows of a table, and predicts numbers in their own unit. What its inputs and outputs are
stands in it as JSON, "polyfed": one of the extra files of a `.pt2`, one of ONNX's metadata.
"""

from __future__ import annotations

import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from polyfed.data.samples import stored_rows
from polyfed.engine.personal_predictor import PersonalPredictor
from polyfed.errors import ConfigError, MissingPackage, kind_and_line
from polyfed.escaping import json_text
from polyfed.experiments.prediction import ClientModel, load
from polyfed.records.read import write_whole
from polyfed.registry import is_installed
from polyfed.version import __version__

__all__ = ["export_model"]

_PACKAGES = ("onnx", "onnxscript")


def export_model(
    run: str | Path, client: int | str, file: str | Path, *, stage: str | None = None, trust: bool = False
) -> Path:
    """Write a client's network as a program: from inputs, "x", to "scores", or to the "prediction" of numbers.

    It holds all that the method predicts by, with the preparation of inputs, and takes any number of rows. Inputs are
    as the run stored them; rows of a table as `stored_rows` takes them, with NaN for what is missing.

    Args:
        run: a finished run's folder. client: number or name.
        file: ends in `.pt2` for `torch.export.load`, or in `.onnx`.
        stage, trust: see `load`.

    Raises:
        ConfigError: see `load`; another file, a network that cannot be exported, or a package is not installed.
    """
    path = Path(file)
    if path.suffix not in (".pt2", ".onnx"):
        raise ConfigError(f"expected a file that ends in .pt2 or .onnx, got {path}")
    if path.suffix == ".onnx" and not all(map(is_installed, _PACKAGES)):
        raise MissingPackage("ONNX files need packages that are not installed: pip install 'polyfed[onnx]'")
    model = load(run, client, trust=trust, stage=stage)
    try:
        program = _program(model)
        facts = json_text(_facts(model), 2)
        if path.suffix == ".onnx":
            content = _onnx(program, facts, _output(model))
        else:
            stream = io.BytesIO()
            torch.export.save(program, stream, extra_files={"polyfed": facts})
            content = stream.getvalue()
    except Exception as error:  # what a network does may be anything
        why = kind_and_line(error)
        raise ConfigError(
            f"client {model.client}'s model ('{model.architecture}') cannot be exported: {why}"
        ) from error
    return write_whole(path, content)


class _Program(PersonalPredictor):
    """From inputs as their files have them to scores, or to numbers in their own unit."""

    def __init__(self, model: ClientModel) -> None:
        super().__init__(model.method, model.network, model.state, model.prepare)
        self._form, self._scale = model.form, model.scale

    def forward(self, x: Tensor) -> Tensor:
        """(N, C), or (N, 1) where numbers are predicted."""
        if self._form.is_table:
            x = stored_rows(x, self._form.columns, self._form.fill)
        scores = super().forward(x)
        return scores if self._scale is None else self._scale.restored(scores[:, :1])


def _program(model: ClientModel) -> ExportedProgram:
    form = model.form
    x = torch.zeros(2, *(form.raw_shape if form.is_table else form.shape), dtype=form.dtype)
    whole = _Program(model).eval()
    with torch.no_grad():
        whole(x)  # what is made once is made before what is recorded
        return torch.export.export(whole, (x,), dynamic_shapes=({0: Dim("rows")},), strict=False)


def _output(model: ClientModel) -> str:
    return "scores" if model.scale is None else "prediction"


def _facts(model: ClientModel) -> dict[str, Any]:
    """What somebody who has the file alone must know: what "x" is, and what comes out."""
    form = model.form
    columns = form.feature_names[: len(form.feature_names) - len(form.columns.flags)]
    pairs = zip(columns, form.columns.categories, strict=False)
    flags = zip(form.columns.flags, form.fill, strict=True)
    return {
        "polyfed": __version__,
        "architecture": model.architecture,
        "method": model.method.name,
        "client": model.client,
        "shape": list(form.raw_shape if form.is_table else form.shape),
        "type": str(form.dtype).removeprefix("torch."),
        "output": _output(model),
        "classes": list(form.class_names),
        "columns": list(columns),
        "categories": {column: list(names) for column, names in pairs if names},  # the i-th is i + 1, others are 0
        "fill": {columns[place]: value for (place, _), value in flags},  # what stands for NaN
        "label_column": form.label_column,
    }


def _onnx(program: ExportedProgram, facts: str, output: str) -> bytes:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it notes that torchvision is not there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of its own code
        made = torch.onnx.export(
            program, (), dynamo=True, external_data=False, verbose=False, input_names=["x"], output_names=[output]
        )
    assert made is not None
    proto = made.model_proto
    proto.metadata_props.add(key="polyfed", value=facts)
    content: bytes = proto.SerializeToString()
    return content
