"""The generators that come with ckpt; a suite file may name them without their module.

| generator | measures |
|---|---|
| ``SaveLoad`` | save (blocking and background part) and load, with ckpt or another library |
| ``Resharding`` | loading an existing checkpoint, or the suite's data, onto another sharding |
| ``LoadAndBroadcast`` | loading where one replica reads and sends to the others |
| ``ReplicaParallelSave`` | saving arrays that are replicated on all devices |
| ``CheckpointerLoop`` | a training loop with saves, retention and resuming |
| ``ManySmallLeaves``, ``UniformLeaves`` | the cost of a leaf, or of a byte: many arrays of one size |
| ``PartialLoad`` | one leaf out of many |
"""

from ckpt_core.bench.generators._loop import CheckpointerLoop as CheckpointerLoop
from ckpt_core.bench.generators._loop import CheckpointerLoopOptions as CheckpointerLoopOptions
from ckpt_core.bench.generators._save_load import LoadAndBroadcast as LoadAndBroadcast
from ckpt_core.bench.generators._save_load import (
    LoadAndBroadcastOptions as LoadAndBroadcastOptions,
)
from ckpt_core.bench.generators._save_load import ManySmallLeaves as ManySmallLeaves
from ckpt_core.bench.generators._save_load import PartialLoad as PartialLoad
from ckpt_core.bench.generators._save_load import PartialLoadOptions as PartialLoadOptions
from ckpt_core.bench.generators._save_load import ReplicaParallelSave as ReplicaParallelSave
from ckpt_core.bench.generators._save_load import (
    ReplicaParallelSaveOptions as ReplicaParallelSaveOptions,
)
from ckpt_core.bench.generators._save_load import Resharding as Resharding
from ckpt_core.bench.generators._save_load import ReshardingOptions as ReshardingOptions
from ckpt_core.bench.generators._save_load import SaveLoad as SaveLoad
from ckpt_core.bench.generators._save_load import SaveLoadOptions as SaveLoadOptions
from ckpt_core.bench.generators._save_load import UniformLeaves as UniformLeaves
from ckpt_core.bench.generators._save_load import UniformLeavesOptions as UniformLeavesOptions
