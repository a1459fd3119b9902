"""Token ids of prompts that are made up."""


def first_token_id(vocab_size: int) -> int:
    """The smallest that prompts are drawn from: those below may be special tokens. A small model keeps most of its vocabulary."""
    return min(300, vocab_size // 4)
