"""Makes the meshes of a suite on the available devices."""

from __future__ import annotations

import math
from typing import Any

from ckpt_core.bench._config import MeshConfig
from ckpt_core.bench._core import Skipped


def make_mesh(config: MeshConfig | None) -> Any:
    """The ``jax.sharding.Mesh`` of a configuration; None for None.

    Raises:
        Skipped: its axes do not fit the devices.
    """
    if config is None:
        return None
    import jax
    from jax.experimental import mesh_utils

    dcn_parallelism = config.dcn_parallelism or {}
    ici = [config.ici_parallelism.get(axis, 1) for axis in config.mesh_axes]
    dcn = [dcn_parallelism.get(axis, 1) for axis in config.mesh_axes]
    wanted, there = math.prod(ici) * math.prod(dcn), jax.device_count()
    if wanted != there:
        raise Skipped(f"the mesh {config.label} needs {wanted} devices, there are {there}")
    try:
        if math.prod(dcn) > 1:
            devices = mesh_utils.create_hybrid_device_mesh(
                ici,
                dcn,
                process_is_granule=config.process_is_granule,
                allow_split_physical_axes=config.allow_split_physical_axes,
            )
        else:
            devices = mesh_utils.create_device_mesh(
                ici, allow_split_physical_axes=config.allow_split_physical_axes
            )
    except (ValueError, NotImplementedError) as error:
        raise Skipped(f"the mesh {config.label} does not fit these devices: {error}") from error
    return jax.sharding.Mesh(devices, config.mesh_axes)
