"""The demo model's vocabulary, with a few ids that its tokenizer does not have."""

from pathlib import Path

from tokenizers import Tokenizer

import pipeinfer.demo
from pipeinfer.grammars.compiling import Grammar, Vocabulary
from pipeinfer.grammars.masks import GrammarSource
from pipeinfer.grammars.trial import Setup
from pipeinfer.params import StructuredOutputs

TOKENIZER = Tokenizer.from_file(str(Path(pipeinfer.demo.__file__).parent / "tokenizer.json"))
WIDTH = TOKENIZER.get_vocab_size() + 9  # so that the last word of a mask is not full
ENDS = (256, 258)
KNOWN = tuple(sorted(TOKENIZER.get_vocab().values()))
SETUP = Setup(TOKENIZER.to_str(), WIDTH, ENDS, KNOWN)
VOCABULARY = Vocabulary(SETUP.tokenizer, WIDTH, ENDS, KNOWN)


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def source(ids=(), **spec):
    return GrammarSource(Grammar(VOCABULARY, StructuredOutputs(**spec)), ids)
