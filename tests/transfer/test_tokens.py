"""The digest of a tokenizer is of what its ids mean, and of nothing else."""

from kvfold.transfer import tokenizer_digest
from tests.tiny_folder import byte_tokenizer


def test_other_templates_are_no_matter_and_other_tokens_are():
    plain, bare, more = byte_tokenizer(), byte_tokenizer(template=None), byte_tokenizer()
    more.add_tokens(["<more>"])
    assert tokenizer_digest(plain) == tokenizer_digest(bare)
    assert tokenizer_digest(plain) != tokenizer_digest(more)
    assert len(tokenizer_digest(plain)) == 64
