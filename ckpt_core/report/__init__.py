"""A report of a run: one HTML page that needs no network, and the data that it shows.

``read_report`` reads, ``as_json`` gives plain values, ``page`` writes them into HTML.
"""

from ckpt_core.report._facts import Report as Report
from ckpt_core.report._facts import as_json as as_json
from ckpt_core.report._page import page as page
from ckpt_core.report._read import Request as Request
from ckpt_core.report._read import read_report as read_report
