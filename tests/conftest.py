"""Settles how Triton runs before any import loads it; shared_fixtures.py has the fixtures."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

# Triton decides at its import, and transformers' models import it: so here, not in a hook.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if find_spec("triton") is None:  # it exists for Linux alone
    collect_ignore_glob = ["*_triton*"]

pytest_plugins = ["shared_fixtures"]
