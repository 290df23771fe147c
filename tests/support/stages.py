"""The graphs of one token write after each stage, for docs/how-it-works.md and its test."""

from __future__ import annotations

import logging
import re

import torch

import aliasstorage
from aliasstorage.stage_logs import log


def token_write(keys, state, slot, x):
    keys[slot] = x.half()
    state[slot] = state[slot] * 0.5 + x
    return keys[slot]


class _Graphs(logging.Handler):
    def __init__(self):
        super().__init__(logging.DEBUG)
        self.found = {}

    def emit(self, record):
        stage, _, text = record.getMessage().partition(":\n")
        self.found[stage] = text


def graphs_of_a_token_write():
    """Return the text of the graph after each stage, by the stage's name."""
    raw = torch.zeros(4096, dtype=torch.uint8)
    keys = raw[:2048].view(torch.float16).view(16, 64)
    state = raw[2048:].view(torch.float32).view(8, 64)
    graphs, level = _Graphs(), log.level
    log.addHandler(graphs)
    log.setLevel(logging.DEBUG)
    try:
        backend = aliasstorage.backend(inner="aot_eager")
        compiled = torch.compile(token_write, backend=backend)
        compiled(keys, state, torch.tensor([3]), torch.ones(1, 64))
    finally:
        log.removeHandler(graphs)
        log.setLevel(level)
    return {stage: tidy(text) for stage, text in graphs.found.items()}


def tidy(text):
    """Leave out the class, where memory is freed, and places that differ between machines."""
    text = re.sub(r"; +[\w = ,]+ = None\b.*", "", text)
    text = re.sub(r"# File: .*, code: ", "# ", text)
    text = re.sub(r"\n +# No stacktrace.*", "", text)
    text = re.sub(r"\n( +\w+ = L_\w+_)+(?=\n)", "", text)
    lines = text.strip().splitlines()[1:]
    return "\n".join(line.removeprefix("    ") for line in lines).strip() + "\n"
