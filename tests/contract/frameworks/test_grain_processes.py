"""A model and a Grain pipeline, saved together by several real processes of jax.distributed."""

import pytest

from tests.support.launch import launch, reports

COMMON = """
import grain
from grain import experimental as gx

def pipeline():
    shard = grain.MapDataset.range(1000).seed(3).shuffle()[index::count]
    return iter(shard.batch(3).to_iter_dataset())

def elastic():
    return gx.ElasticIterator(
        grain.MapDataset.range(960).seed(3).shuffle().repeat(), 24,
        grain.sharding.ShardOptions(index, count),
        read_options=grain.ReadOptions(num_threads=1, prefetch_buffer_size=2),
    )

def take(data, number):
    return [np.asarray(next(data)).tolist() for _ in range(number)]

def model(value):
    return {"w": put(np.full(8, value, np.float32))}
def weights(tree):
    return [np.asarray(shard.data).tolist() for shard in tree["w"].addressable_shards]
"""

SAVE = """
data, other = pipeline(), elastic()
shown = take(data, 2 + index)  # each is somewhere else
take(other, 2)
with ckpt.Checkpointer(f"{directory}/steps", options=options) as checkpointer:
    checkpointer.save(7, model=model(1.5), data=data, other=other)
report(shown=shown, follows=take(data, 3), others=take(other, 2))
"""

RESUME = """
data, other = pipeline(), elastic()
with ckpt.Checkpointer(f"{directory}/steps", options=options) as checkpointer:
    restored = checkpointer.restore_latest(model=model(0), data=data, other=other)
report(
    step=restored.step, weights=weights(restored["model"]), follows=take(data, 3),
    others=take(other, 2),
)
"""

ELSEWHERE = """
data, other = pipeline(), elastic()
with ckpt.Checkpointer(f"{directory}/steps", options=options) as checkpointer:
    refused = raised(lambda: checkpointer.restore_latest(model=model(0), data=data))
    without = checkpointer.restore_latest(model=model(0), other=other)
report(
    refused=refused, first=take(data, 1), weights=weights(without["model"]), others=take(other, 2)
)
"""


def joined(reports: list[dict[str, list[list[int]]]]) -> list[list[int]]:
    """The elements of each global batch, whatever process got them."""
    rounds = zip(*(one["others"] for one in reports), strict=True)
    return [sorted(element for part in parts for element in part) for parts in rounds]


@pytest.mark.parametrize(("saved", "now"), [(2, 4), (4, 2)])
def test_a_state_for_each_process(tmp_path, saved, now):
    directory = tmp_path / "run"
    first = reports(launch(COMMON + SAVE, directory, processes=saved, devices=4 // saved))
    names = [f"process_{index}-of-{saved}.json" for index in range(saved)]
    folder = directory / "steps/7/data"
    assert sorted(file.name for file in folder.glob("process_*")) == names
    texts = {(folder / name).read_text() for name in names}
    assert len(texts) == saved  # the positions differ

    again = reports(launch(COMMON + RESUME, directory, processes=saved, devices=4 // saved))
    for before, after in zip(first, again, strict=True):
        assert after["step"] == 7
        assert after["follows"] == before["follows"] and after["others"] == before["others"]
        assert after["weights"] == [[1.5, 1.5]] * (4 // saved)

    elsewhere = reports(launch(COMMON + ELSEWHERE, directory, processes=now, devices=4 // now))
    for one in elsewhere:
        assert one["refused"]["type"] == "StructureMismatch", one["refused"]
        assert f"saved {saved}, wanted {now}" in one["refused"]["text"]
        assert "ElasticIterator" in one["refused"]["text"]  # what to do
        assert one["refused"]["secs"] < 20
        assert one["weights"] == [[1.5, 1.5]] * (4 // now)  # the rest can be had without it
    # the refused pipelines were not moved
    starts = sorted(element for one in elsewhere for element in one["first"][0])
    assert len(starts) == len(set(starts)) == 3 * now
    # an elastic pipeline goes on with the same global batches
    assert joined(elsewhere) == joined(first)
