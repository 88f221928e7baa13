"""The chain beside a model of it, and deltas of arrays of any kind, read from parts that anybody may have written."""

import random
import zlib

import ml_dtypes
import numpy as np
import pytest

from ckpt_core import CheckpointCorrupt
from ckpt_core._publish.chain import Chain, DeltaFile, Version, parse_chain, route
from ckpt_core._publish.delta import Change, apply, cells, difference, pack, unpack


@pytest.mark.parametrize("seed", range(40))
def test_a_follower_gets_to_the_newest_version_over_deltas_that_fit(seed):
    chance = random.Random(seed)
    chain, bases, held = Chain(), dict[str, str](), [""] * 3
    every, most = chance.choice([1, 2, 5]), chance.choice([None, 1, 4])
    number, before = 0, ""
    for count in range(60):
        if chance.random() < 0.1:  # the trainer was killed, and went back, or not
            number, before = max(0, number - chance.randrange(4)), ""
        token = f"{count:032x}"
        delta = bool(before) and chance.random() < 0.9
        anchor = not delta or chain.wants_anchor(every)
        bases[token] = before
        files = (DeltaFile(f".ckpt-delta-{number}-0-9", 9, 9),) if delta else ()
        chain = chain.published(Version(number, token, anchor, files), most)
        number, before = number + 1, token
        assert parse_chain(chain.dump(), "run") == chain
        numbers = [one.number for one in chain.versions]
        assert numbers == sorted({*numbers})
        anchors = sum(one.anchor for one in chain.versions)
        assert anchors <= max(2, most or 60)
        for who, stood in enumerate(held):
            if chance.random() < 0.5:
                continue
            lost = {
                (one.token, chance.random() < 0.5)
                for one in chain.versions
                if chance.random() < 0.1
            }
            at = stood
            for one, is_anchor in route(chain, stood, lost):
                # never onto another version
                assert one.anchor if is_anchor else bases[one.token] == at
                assert (one.token, is_anchor) not in lost
                at = one.token
            assert at == token or lost
            assert route(chain, at, lost) == []
            held[who] = at


@pytest.mark.parametrize(
    "data",
    b"""{} [1 \xff ["",[["../..","0",true,[]]]] ["",[[1,"../x",true,[]]]] ["",[[1,"0",false,[["../x",1,1]]]]]
    ["",[[1,"0",false,[[1,1,1]]]]] ["",[[1,"0",false,[["x",1e999,1]]]]]""".split(),
)
def test_a_damaged_chain(data):
    for chain in (data, b"%08x\n%s" % (zlib.crc32(data), data), Chain("a").dump() + data):
        with pytest.raises(CheckpointCorrupt, match="the next publish writes it anew"):
            parse_chain(chain, "run")


KINDS = [
    ("bfloat16", (30, 70), ((10, 20), (3, 50)), 0.05),
    ("float32", (5000,), ((0, 5000),), 0.9),
    ("complex128", (40, 30), ((0, 40), (10, 30)), 0.1),
    ("float64", (), (), 1.0),
    ("int8", (2_500_000,), ((0, 2_500_000),), 0.00001),
    ("uint16", (1_200, 1_000), ((5, 1_200), (0, 1_000)), 0.6),
    ("bfloat16", (0, 3), ((0, 0), (0, 3)), 1.0),
    ("bool", (77,), ((3, 77),), 0.5),
]


def changed(kind, shape, region, share):
    """An array, and one of which a part of a region differs."""
    dtype, chance = np.dtype(getattr(ml_dtypes, kind, kind)), np.random.default_rng(1)
    most = 2 if kind == "bool" else 256
    size = int(np.prod(shape)) * dtype.itemsize
    old = chance.integers(0, most, size, np.uint8).view(dtype).reshape(shape)
    new, inside = old.copy(), tuple(slice(*part) for part in region)
    found = cells(new[inside]).copy()
    where = chance.random(found.size) < share
    found[where] ^= found.dtype.type(1)
    new[inside] = found.view(dtype).reshape(old[inside].shape)[()]
    return old, new, inside


@pytest.mark.parametrize(("kind", "shape", "region", "share"), KINDS)
def test_what_changed_comes_back(kind, shape, region, share):
    old, new, inside = changed(kind, shape, region, share)
    before, after = cells(old[inside]), cells(new[inside])
    data = difference(before, after)
    part = pack([Change("w", 0, region, len(data), 5)], [data])
    ((change, found),) = unpack("part", part, 2 * old.nbytes + 1_000)
    assert change == ("w", 0, region, len(data), 5)
    if data:
        got = before.copy()
        apply(found, got)
        assert got.tobytes() == after.tobytes()
    assert difference(after, after) == b""


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_parts_that_lie_are_refused(share):
    old, new, _ = changed("uint16", (901,), ((0, 901),), share)
    before, after = cells(old), cells(new)
    data, ones = np.frombuffer(difference(before, after), np.uint8), np.full(2_001, 255, np.uint8)
    assert data[0] == (share > 1 / 8)
    beyond = np.append(data[:1], ones)
    for lie in (data[:-1], data[:-2], data[:-3], data[:52], data[:0], data[1:], ones, beyond):
        got = before.copy()
        try:
            apply(lie, got)
        except (ValueError, IndexError):
            continue
        assert got.tobytes() != after.tobytes()  # so its CRC differs
    for part in (b"", b"junk", pack([], [bytes(80_000_000)])):
        with pytest.raises(ValueError):
            list(unpack("part", part, 1_000_000))
