import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superpod.data.tokens import indexed
from superpod.errors import UserError

DOCUMENTS = [[1, 2, 3], [4], [], [65499, 0, 7, 7]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with indexed.Writer(tmp_path / "a.b c\n'x'", vocab=65499) as out:
        for tokens in DOCUMENTS:
            out.add(tokens)
    return tmp_path / "a.b c\n'x'"


def test_header_equals_megatrons(prefix: Path):
    raw = indexed.idx_path(prefix).read_bytes()
    assert raw[:34] == b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5)
    assert struct.unpack("<4i", raw[34:50]) == (3, 1, 0, 4)
    assert struct.unpack("<4q", raw[50:82]) == (0, 6, 8, 8)
    assert struct.unpack("<5q", raw[82:]) == (0, 1, 2, 3, 4)
    assert indexed.bin_path(prefix).read_bytes() == struct.pack("<8H", 1, 2, 3, 4, 65499, 0, 7, 7)


def test_verify_and_digest(prefix: Path):
    assert indexed.verify(prefix) == indexed.IndexSummary(documents=4, sequences=4, tokens=8, dtype="uint16")
    seen: list[int] = []
    indexed.digest(prefix, seen.append)
    assert sum(seen) == 16 + 34 + 4 * 12 + 5 * 8


@pytest.mark.parametrize(("vocab", "dtype"), [(1, "uint16"), (65499, "uint16"), (65500, "int32"), (200_000, "int32")])
def test_dtype(vocab: int, dtype: str):
    assert indexed.dtype_for(vocab) == dtype


def test_id_beyond_dtype_is_an_error(tmp_path: Path):
    with pytest.raises(OverflowError), indexed.Writer(tmp_path / "x", vocab=300) as out:
        out.add([70_000])
    assert not indexed.idx_path(tmp_path / "x").exists()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 299), max_size=20), min_size=1, max_size=30),
    st.sampled_from([300, 100_000]),
)
def test_round_trip(documents: list[list[int]], vocab: int):
    with TemporaryDirectory() as folder:
        prefix = Path(folder) / "x"
        with indexed.Writer(prefix, vocab) as out:
            for tokens in documents:
                out.add(tokens)
        facts = indexed.verify(prefix)
        assert (facts.documents, facts.tokens) == (len(documents), sum(map(len, documents)))
        assert indexed.read_lengths(prefix).tolist() == [len(tokens) for tokens in documents]
        assert out.sha256 == indexed.digest(prefix)
        code = f"<{facts.tokens}{'H' if facts.itemsize == 2 else 'i'}"
        flat = [token for tokens in documents for token in tokens]
        assert list(struct.unpack(code, indexed.bin_path(prefix).read_bytes())) == flat


@pytest.mark.nemo
@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=20), min_size=1, max_size=20), st.booleans())
def test_same_bytes_as_megatron(nemo: None, documents: list[list[int]], wide: bool):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    import torch

    vocab = 100_000 if wide else 300
    with TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
        builder = megatron.IndexedDatasetBuilder(f"{theirs}.bin", dtype=megatron.DType.optimal_dtype(vocab))
        with indexed.Writer(ours, vocab) as out:
            for tokens in documents:
                out.add(tokens)
                builder.add_document(torch.tensor(tokens), [len(tokens)])
        builder.finalize(f"{theirs}.idx")
        for path in (indexed.bin_path, indexed.idx_path):
            assert path(ours).read_bytes() == path(theirs).read_bytes()
        read = megatron.IndexedDataset(str(ours))
        assert [read[number].tolist() for number in range(len(read))] == documents


def _patch(at: int, form: str, value: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + struct.pack(form, value) + raw[at + struct.calcsize(form) :]


@pytest.mark.parametrize(
    ("ending", "damage", "message"),
    [
        ("bin", None, r"\.bin is missing: a prefix needs both"),
        ("idx", None, r"\.idx is missing: a prefix needs both"),
        ("idx", lambda raw: b"", r"is not a Megatron index: it begins with b''"),
        ("idx", lambda raw: b"PK" + raw[2:], r"is not a Megatron index: it begins with b'PK"),
        ("idx", lambda raw: raw[:20], r"truncated: 20 bytes, but its header has 34"),
        ("idx", lambda raw: raw[:-1], r"truncated: 4 sequences need 122 bytes, not 121"),
        ("idx", lambda raw: raw + b"0", r"too long: 4 sequences need 122 bytes, not 123"),
        ("idx", _patch(9, "<Q", 2), r"index version 2"),
        ("idx", _patch(17, "<B", 99), r"dtype code 99 \(unknown\)"),
        ("idx", _patch(17, "<B", 7), r"dtype code 7 \(float32\)"),
        ("idx", lambda raw: raw[:18] + struct.pack("<QQ", 0, 1) + bytes(8), r"has no documents"),
        ("idx", lambda raw: raw[:18] + struct.pack("<QQ", 4, 0) + raw[34:82], r"has no documents"),
        ("idx", _patch(82, "<q", 1), r"boundaries must increase from 0 to 4"),
        ("idx", _patch(114, "<q", 3), r"boundaries must increase from 0 to 4"),
        ("idx", _patch(90, "<q", 3), r"boundaries must increase from 0 to 4"),
        ("idx", _patch(34, "<i", -3), r"negative length or pointer"),
        ("idx", _patch(50, "<q", -2), r"negative length or pointer"),
        ("idx", _patch(74, "<q", 10), r"points to byte 18 of .*\.bin, which has 16"),
        ("idx", _patch(58, "<q", 4), r"not contiguous"),
        ("bin", lambda raw: raw[:-2], r"points to byte 16 of .*\.bin, which has 14"),
        ("bin", lambda raw: raw + b"00", r"8 tokens of 2 bytes are 16 bytes, but the file has 18"),
    ],
)  # fmt: skip
def test_reports_corruption(prefix: Path, ending: str, damage: Callable[[bytes], bytes] | None, message: str):
    path = Path(f"{prefix}.{ending}")
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=f"(?s){message}") as caught:
        indexed.verify(prefix)
    assert caught.value.hint
