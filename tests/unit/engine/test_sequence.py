"""A forked choice has all that its parent has, and shares nothing that can change."""

import numpy as np
from support.engine.kv import sequence_of

from loraplex.engine.text.detokenizer import Detokenizer


def test_a_choice_has_every_field_of_its_parent_and_no_list_of_it() -> None:
    parent = sequence_of([1, 2, 3], prompt_logprobs=1, n=2)

    child = parent.fork(1)

    assert vars(child).keys() == vars(parent).keys()
    shared = {
        name
        for name, value in vars(child).items()
        if isinstance(value, list | dict | set | np.ndarray | Detokenizer)
        and value is getattr(parent, name)
    }
    assert shared == set()


def test_a_forked_detokenizer_has_every_field_and_tokens_of_its_own() -> None:
    parent = sequence_of([1, 2, 3]).detokenizer

    twin = parent.fork()

    assert vars(twin) == vars(parent)
    assert twin._ids is not parent._ids
