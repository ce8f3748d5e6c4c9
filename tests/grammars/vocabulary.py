"""The demo model's vocabulary, with a few ids that its tokenizer does not have."""

from pathlib import Path

import numpy as np
from llguidance import LLExecutor
from tokenizers import Tokenizer

import pipeinfer.demo
from pipeinfer.grammars.bounds import VocabularySetup
from pipeinfer.grammars.compiling import Grammar, GrammarVocabulary
from pipeinfer.grammars.masks import GrammarSource, fill_masks
from pipeinfer.params import StructuredOutputs

TOKENIZER = Tokenizer.from_file(str(Path(pipeinfer.demo.__file__).parent / "tokenizer.json"))
WIDTH = TOKENIZER.get_vocab_size() + 9  # so that the last word of a mask is not full
ENDS = (256, 258)
KNOWN = tuple(sorted(TOKENIZER.get_vocab().values()))
SETUP = VocabularySetup(TOKENIZER.to_str(), WIDTH, ENDS, KNOWN)
VOCABULARY = GrammarVocabulary(SETUP.tokenizer, WIDTH, ENDS, KNOWN)

ALONE = LLExecutor(1)


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def allowed(row):
    """Ids that a row may sample next."""
    words = np.zeros(VOCABULARY.words, dtype=np.int32)
    assert fill_masks(ALONE, [row], words[None]) == [getattr(row, "error", "")]
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def source(ids=(), **spec):
    return GrammarSource(Grammar(VOCABULARY, StructuredOutputs(**spec)), ids)
