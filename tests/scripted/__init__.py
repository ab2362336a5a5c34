"""A kernel that a test drives: real sockets, one of three generations, every request recorded."""

from tests.scripted.generations import GENERATION_1, GENERATION_2, GENERATION_3, Generation
from tests.scripted.http import Answer, Recorded
from tests.scripted.kernel import ScriptedKernel
from tests.scripted.serving import served, wait_until
from tests.scripted.state import Verdict

__all__ = [
    "GENERATION_1",
    "GENERATION_2",
    "GENERATION_3",
    "Answer",
    "Generation",
    "Recorded",
    "ScriptedKernel",
    "Verdict",
    "served",
    "wait_until",
]
