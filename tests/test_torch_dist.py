"""weights/torch_dist.py against torch.save and torch.distributed.checkpoint, written and read."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import zipfile
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_rl.settings.switch import CannotWork
from ascend_rl.weights import torch_dist
from ascend_rl.weights.files import Place

DTYPES = {name: getattr(torch, name) for name in torch_dist.ITEMSIZE}


@given(
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 200),
)
@settings(max_examples=60)
def test_an_archive_is_what_torch_save_means(dtype, shape, before):
    values = torch.randn(shape).to(dtype)
    raw = values.view(torch.uint8).numpy().tobytes()
    archive = torch_dist.Archive(str(dtype)[6:], tuple(shape))
    head, tail = archive.frame(zlib.crc32(raw))
    content = head + raw + tail
    assert len(content) == archive.length and len(head) == archive.values_offset and len(head) % 64 == 0
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert loaded.dtype == dtype and torch.equal(loaded, values)
    saved = io.BytesIO()
    torch.save(values, saved)
    with zipfile.ZipFile(io.BytesIO(content)) as ours, zipfile.ZipFile(saved) as theirs:
        assert ours.testzip() is None
        assert ours.read("archive/data.pkl") == theirs.read("archive/data.pkl")
        assert ours.read("archive/data/0") == theirs.read("archive/data/0")


def test_the_metadata_is_what_torch_itself_would_pickle():
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    place, other = Place("__0_0.distcp", 64, 2**33), Place("__0_1.distcp", 0, 9)
    chunks = [("a", (0, 0), (1, 3), place), ("a", (1, 0), (1, 3), other), ("b", (0,), (300,), other)]
    tensors = {"a": ("bfloat16", (2, 3)), "b": ("float32", (300,))}
    found = pickle.loads(torch_dist.metadata(tensors, chunks, [("a._extra_state/shard_0_1", other)]))
    assert found.mcore_data == {"a": {}, "b": {}}
    expected = dcp.Metadata(
        {
            "a": dcp.TensorStorageMetadata(
                dcp.TensorProperties(torch.bfloat16),
                torch.Size([2, 3]),
                [dcp.ChunkStorageMetadata(torch.Size([i, 0]), torch.Size([1, 3])) for i in range(2)],
            ),
            "b": dcp.TensorStorageMetadata(
                dcp.TensorProperties(torch.float32),
                torch.Size([300]),
                [dcp.ChunkStorageMetadata(torch.Size([0]), torch.Size([300]))],
            ),
            "a._extra_state/shard_0_1": dcp.BytesStorageMetadata(),
        },
        planner_data={},
        storage_data={
            dcp.MetadataIndex("a", [0, 0]): _StorageInfo("__0_0.distcp", 64, 2**33),
            dcp.MetadataIndex("a", [1, 0]): _StorageInfo("__0_1.distcp", 0, 9),
            dcp.MetadataIndex("b", [0]): _StorageInfo("__0_1.distcp", 0, 9),
            dcp.MetadataIndex("a._extra_state/shard_0_1"): _StorageInfo("__0_1.distcp", 0, 9),
        },
    )
    assert found == expected
    assert isinstance(found.state_dict_metadata["a"].size, torch.Size)
    again = pickle.loads(pickle.dumps(expected))  # the same attributes in each object, not just equal ones
    for mine, theirs in zip(found.storage_data.items(), again.storage_data.items(), strict=True):
        assert [vars(part) for part in mine] == [
            vars(part) | {"index": vars(part_mine).get("index")} if "fqn" in vars(part) else vars(part)
            for part, part_mine in zip(theirs, mine, strict=True)
        ]


def test_a_wrong_checksum_is_visible():
    archive = torch_dist.Archive("float32", (4,))
    head, tail = archive.frame(1)
    with zipfile.ZipFile(io.BytesIO(head + bytes(16) + tail)) as content:
        assert content.testzip() == "archive/data/0"


def test_the_metadata_unpickler_builds_tensors_only():
    with pytest.raises(pickle.UnpicklingError, match="unexpected"):
        torch_dist._TensorUnpickler(io.BytesIO(pickle.dumps(os.system))).load()


def save(directory, tensor: torch.Tensor, cuts: list[list[int]], between: bytes = b"") -> list[tuple]:
    """``tensor`` as key "w" of a checkpoint, cut at ``cuts`` of each axis, each chunk an archive of
    torch.save with ``between`` before it; the chunks as `torch_dist.metadata` takes them.
    """
    chunks, content = [], b""
    for corner in itertools.product(*(itertools.pairwise(axis) for axis in cuts)):
        part = tensor[tuple(slice(first, last) for first, last in corner)]
        stream = io.BytesIO()
        torch.save(part.clone(), stream)
        content += between
        place = Place("__0_0.distcp", len(content), stream.tell())
        content += stream.getvalue()
        chunks.append(("w", tuple(c[0] for c in corner), tuple(part.shape), place))
    (directory / "__0_0.distcp").write_bytes(content)
    describe(directory, tensor, chunks)
    return chunks


def describe(directory, tensor: torch.Tensor, chunks: list[tuple]) -> None:
    tensors = {"w": (str(tensor.dtype)[6:], tuple(tensor.shape))}
    (directory / ".metadata").write_bytes(torch_dist.metadata(tensors, chunks, []))
    (directory / "metadata.json").write_text(json.dumps(torch_dist.FORMAT))


@st.composite
def cut_tensors(draw):
    """Leading axes, rows and perhaps columns, with cuts in any of them; how many leading axes."""
    leading, columns = draw(st.integers(0, 2)), draw(st.integers(0, 1))
    shape = [draw(st.integers(1, 5)) for _ in range(leading + 1 + columns)]
    cuts = [[0, *sorted(draw(st.sets(st.integers(1, max(1, size - 1))))), size] for size in shape]
    cuts = [sorted(set(axis)) for axis in cuts]
    return shape, cuts, leading


@given(cut_tensors(), st.sampled_from(list(DTYPES)), st.binary(max_size=9), st.data())
@settings(max_examples=80)
def test_rows_are_read_from_whatever_chunks_torch_saved(tmp_path_factory, cut, dtype, between, data):
    (shape, cuts, leading), directory = cut, tmp_path_factory.mktemp("checkpoint")
    tensor = torch.randn(shape).to(DTYPES[dtype])
    save(directory, tensor, cuts, between)
    checkpoint = torch_dist.Checkpoint(directory)
    assert checkpoint.tensors == {"w": (dtype, tuple(shape))} and checkpoint.objects == []
    for index in np.ndindex(*shape[:leading]):
        matrix = tensor[index].reshape(shape[leading], -1)
        first = data.draw(st.integers(0, shape[leading] - 1))
        last = data.draw(st.integers(first + 1, shape[leading]))
        out = np.zeros((last - first, matrix.shape[1] * matrix.element_size()), np.uint8)
        checkpoint.read_rows("w", index, first, out)
        assert np.array_equal(out, matrix[first:last].contiguous().view(torch.uint8).numpy())
    checkpoint.close()


def read_all(directory, shape) -> np.ndarray:
    checkpoint = torch_dist.Checkpoint(directory)
    out = np.zeros((shape[0], shape[1] * 4), np.uint8)
    checkpoint.read_rows("w", (), 0, out)
    return out


def test_what_is_not_as_the_metadata_says_is_refused(tmp_path):
    tensor = torch.randn(4, 6)
    chunks = save(tmp_path, tensor, [[0, 2, 4], [0, 6]])
    describe(tmp_path, tensor, chunks[:1])
    with pytest.raises(CannotWork, match="rows 0:4 have 48 bytes of 96; chunks are missing or overlap"):
        read_all(tmp_path, tensor.shape)
    describe(tmp_path, tensor, [chunks[0], (*chunks[1][:3], chunks[0][3])])
    assert np.array_equal(read_all(tmp_path, tensor.shape)[2:], read_all(tmp_path, tensor.shape)[:2])
    describe(tmp_path, tensor, [("w", (0, 0), (4, 6), chunks[0][3])])
    with pytest.raises(CannotWork, match=r"holds float32 \(2, 6\), .metadata says float32 \(4, 6\)"):
        read_all(tmp_path, tensor.shape)
    describe(tmp_path, tensor.half(), [("w", (0, 0), (2, 6), chunks[0][3])])
    with pytest.raises(CannotWork, match=r"holds float32 \(2, 6\), .metadata says float16 \(2, 6\)"):
        read_all(tmp_path, tensor.shape)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CannotWork, match="a 'zarr' checkpoint; torch_dist is needed"):
        torch_dist.Checkpoint(tmp_path)


def test_transposed_values_are_refused_and_views_are_read(tmp_path):
    """torch.save keeps a view's whole storage, its offset and its strides."""
    tensor = torch.arange(24.0).view(4, 6)
    for saved, right in (
        (tensor.t().contiguous().t(), False),
        (torch.arange(-5.0, 30)[5:29].view(4, 6), True),
    ):
        stream = io.BytesIO()
        torch.save(saved, stream)
        (tmp_path / "__0_0.distcp").write_bytes(stream.getvalue())
        describe(tmp_path, tensor, [("w", (0, 0), (4, 6), Place("__0_0.distcp", 0, stream.tell()))])
        if right:
            assert np.array_equal(read_all(tmp_path, (4, 6)), tensor.view(torch.uint8).numpy())
        else:
            with pytest.raises(CannotWork, match="not stored contiguously"):
                read_all(tmp_path, (4, 6))


def test_what_does_not_fit_an_archive_without_zip64_is_refused():
    limit = torch_dist.ZIP_LIMIT_BYTES
    head, tail = torch_dist.Archive("bfloat16", (limit // 2,)).frame(0)
    assert len(head) + limit + len(tail) < 2**32
    with pytest.raises(CannotWork, match="too large for one archive"):
        torch_dist.Archive("bfloat16", (limit // 2 + 1,)).frame(0)


def test_objects_are_what_torch_loads():
    value = {"args": [1, None], "iteration": 3}
    content = torch_dist.object_archive(value)
    assert torch.load(io.BytesIO(content), weights_only=True) == value
    assert content == torch_dist.object_archive(value)
