"""What most often goes wrong on a machine: versions that do not fit, slow or full file systems, locks, clocks."""

from ckpt_core._doctor.findings import Finding as Finding
from ckpt_core._doctor.findings import floors as floors
from ckpt_core._doctor.findings import installed as installed
from ckpt_core._doctor.findings import of_directory as of_directory
from ckpt_core._doctor.findings import of_disk as of_disk
from ckpt_core._doctor.findings import of_missing as of_missing
from ckpt_core._doctor.findings import of_store as of_store
from ckpt_core._doctor.findings import of_versions as of_versions
from ckpt_core._doctor.probes import Disk as Disk
from ckpt_core._doctor.probes import Store as Store
from ckpt_core._doctor.probes import copy_bytes_per_sec as copy_bytes_per_sec
from ckpt_core._doctor.probes import probe as probe
