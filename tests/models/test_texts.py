"""Networks for texts: counts, padding, word vectors, parts, and a run on every executor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

import polyfed
from polyfed.errors import RunInterrupted
from polyfed.models import build
from polyfed.models.split import SplitModel

SIZES = {"fedhenn-lstm1": 221_472, "fedhenn-lstm2": 353_568}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def made(name: str, words: int | Tensor = 12) -> SplitModel:
    torch.manual_seed(0)
    return build(name, (6,), 2, words=words).eval()


@pytest.mark.parametrize("name", SIZES)
def test_counts(name: str) -> None:
    assert count(made(name)) == SIZES[name] + 12 * 300
    fixed = made(name, torch.zeros(9, 300))
    assert count(fixed) == SIZES[name]
    assert sum(t.numel() for t in fixed.state_dict().values()) == SIZES[name]  # vectors are not sent


@pytest.mark.parametrize("name", SIZES)
def test_padding_changes_nothing_and_the_last_word_counts(name: str) -> None:
    model = made(name)
    alone, padded = torch.tensor([[3, 5, 4]]), torch.tensor([[3, 5, 4, 0, 0, 0], [7, 1, 2, 9, 8, 6]])
    torch.testing.assert_close(model.extract(alone), model.extract(padded)[:1], rtol=0, atol=1e-6)
    assert not torch.allclose(model.extract(alone), model.extract(torch.tensor([[3, 5, 6]])))
    assert not torch.allclose(model.extract(alone), model.extract(torch.tensor([[5, 3, 4]])))
    assert torch.isfinite(model(torch.zeros(2, 6, dtype=torch.int64))).all()


def test_the_lstm_is_torchs_on_packed_sequences() -> None:
    model = made("fedhenn-lstm2")
    x, lengths = torch.tensor([[3, 5, 4, 0], [7, 1, 2, 9], [2, 0, 0, 0]]), torch.tensor([3, 4, 1])
    part = model.extractor
    packed = nn.utils.rnn.pack_padded_sequence(part.embedding(x), lengths, batch_first=True, enforce_sorted=False)
    _, (state, _) = part.lstm(packed)
    torch.testing.assert_close(model.extract(x), state[-1], rtol=0, atol=1e-6)


def test_parts_meet_and_dropout_is_before_the_head_alone() -> None:
    model, x = made("fedhenn-lstm1"), torch.tensor([[3, 5, 4]])
    assert (model.feature_dim, model.extract(x).shape, model.represent(x).shape) == (10, (1, 128), (1, 10))
    assert torch.equal(model(x), model.head(model.represent(x)))
    assert not torch.equal(made("fedhenn-lstm1").train().represent(x.repeat(64, 1)), model.represent(x.repeat(64, 1)))


def test_given_vectors_are_looked_up_and_stay() -> None:
    vectors = torch.randn(9, 5)
    model, x = made("fedhenn-lstm1", vectors), torch.tensor([[3, 5]])
    out, _ = model.extractor.lstm(vectors[x])
    torch.testing.assert_close(model.extract(x), out[:, -1])
    model(x).sum().backward()
    assert not model.extractor.vectors.requires_grad
    torch.testing.assert_close(model.extractor.vectors, vectors)


# runs ----------------------------------------------------------------------------------------------------------------

TEXT = """
[data]
dataset = "sentiment140"
root = "."
num_clients = 2
partition = "by_group"
group_by = "user"
num_groups = 2
split = "official"
vocab_size = 8
max_length = 4
holdout = 4
[models]
architectures = ["fedhenn-lstm1", "fedhenn-lstm2"]
[method]
name = "fedhenn"
eta0 = 1.0
alignment_data.size = 4
alignment_data.batch = 4
[training]
rounds = 2
batch_size = 8
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "sentiment140"
    folder.mkdir()
    for side, rows in (("train", 36), ("test", 12)):
        texts = [f"{'good fine' if row % 2 else 'bad'} day number {row % 5}" for row in range(rows)]
        columns = {
            "text": texts,
            "sentiment": [4 * (r % 2) for r in range(rows)],
            "user": [f"u{r}" for r in range(rows)],
        }
        pq.write_table(pa.table(columns), folder / f"{side}.parquet")
    place = tmp_path / "text.toml"
    place.write_text(TEXT)
    return place


def weights(folder: str) -> list[bytes]:
    return [(Path(folder) / "models" / f"client-00{client}.safetensors").read_bytes() for client in range(2)]


def stop(record: Mapping[str, Any]) -> None:
    raise KeyboardInterrupt


def test_serial_pool_cohort_and_resume_agree_bit_for_bit(recipe: Path) -> None:
    for executor in (
        "serial",
        "processes",
        "vectorized",
    ):  # vectorized: one client after the other, as nn.LSTM cannot be stacked
        polyfed.run(recipe, out=executor, overrides=[f"run.executor='{executor}'"])
    with pytest.raises(RunInterrupted):
        polyfed.run(recipe, out="resumed", overrides=["run.executor='serial'"], loggers=[stop])
    polyfed.run(recipe, out="resumed", overrides=["run.executor='serial'"], resume=True)
    assert weights("serial") == weights("processes") == weights("vectorized") == weights("resumed")
    assert weights("serial")[0] != weights("serial")[1]


IDS = torch.tensor([[5, 3, 9, 0, 0, 0], [4, 4, 2, 7, 8, 1], [0, 0, 0, 0, 0, 0]])


def test_padding_changes_nothing():
    torch.manual_seed(0)
    model = build("text-transformer", (6,), 2, words=12).eval()
    whole = model(IDS)
    assert torch.allclose(whole[:1], model(IDS[:1, :3]), atol=1e-6)
    other = IDS.clone()
    other[0, 1] = 6
    assert not torch.allclose(model(other)[0], whole[0])
    assert whole.isfinite().all()  # a text without words, too
    assert not model.extract(IDS)[2].any()


def test_sizes():
    with torch.device("meta"):
        model = build("text-transformer", (25,), 2, words=100)
    total = sum(p.numel() for p in model.parameters())
    assert total - 100 * 64 == 101_826
    assert model.feature_dim == 64
    assert {model.part_of(name) for name in model.state_dict()} == {"extractor", "intermediate", "head"}
