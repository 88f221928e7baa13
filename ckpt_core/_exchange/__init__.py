"""Files of local checkpoints from one process to another: HTTP on the job's own network.

The only package that opens sockets. Nothing is pushed: the process that needs files fetches them. A
server gives what its ``ServedParts`` lists and nothing else, to who knows the secret of the job.
"""

from ckpt_core._exchange.addresses import Networks as Networks
from ckpt_core._exchange.addresses import choose_address as choose_address
from ckpt_core._exchange.addresses import networks_of as networks_of
from ckpt_core._exchange.addresses import route_to as route_to
from ckpt_core._exchange.client import BLOCK_BYTES as BLOCK_BYTES
from ckpt_core._exchange.client import IDLE_SECS as IDLE_SECS
from ckpt_core._exchange.client import Connection as Connection
from ckpt_core._exchange.client import Lacking as Lacking
from ckpt_core._exchange.client import Peer as Peer
from ckpt_core._exchange.server import Key as Key
from ckpt_core._exchange.server import Offered as Offered
from ckpt_core._exchange.server import ServedParts as ServedParts
from ckpt_core._exchange.server import Server as Server
from ckpt_core._exchange.server import open_plain as open_plain
