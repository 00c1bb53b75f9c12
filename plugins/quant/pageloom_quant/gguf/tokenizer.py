"""From GGUF metadata to a tokenizer of `transformers`.

GGUF holds vocabularies of two kinds: ``gpt2``, byte-level BPE with its merges, and ``llama``,
SentencePiece BPE, whose merges follow from the scores of the pieces. Both become the same kind of
`tokenizers.Tokenizer` that a ``tokenizer.json`` describes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from pageloom_quant.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from pageloom_quant.gguf.reader import GGUFFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE = "\u2581"  # how SentencePiece writes a space
NAMED_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
# Phi-3 swallows white space after its control tokens, except after these; only the code of
# llama.cpp says so, not the file.
PHI3_KEEPS_SPACE_AFTER = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def build_tokenizer(file: GGUFFile, pre: str | None = None) -> PreTrainedTokenizerBase | None:
    """The tokenizer in ``file``, or None if it has none. ``pre`` replaces ``tokenizer.ggml.pre``.

    Raises `ValueError` for a kind of vocabulary, or a way to cut text, that is not known, and for
    tables that do not fit each other.
    """
    kind = file.get("tokenizer.ggml.model", str, "none")
    if pre is not None and kind != "gpt2":
        raise file.error(f"has a tokenizer of kind {kind!r}, for which pre_tokenizer means nothing")
    if kind in ("none", "no_vocab"):
        return None
    if kind == "gpt2":
        chosen = _pre_tokenizer(file, pre)
        backend = _byte_level(file, chosen)
        adds_bos = chosen.adds_bos
    elif kind == "llama":
        backend = _sentencepiece(file)
        adds_bos = True
    else:
        raise file.error(f"has a tokenizer of kind {kind!r}; gpt2 and llama can be loaded")
    _add_tokens(file, backend, kind)
    named = _named_tokens(file)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.get("tokenizer.chat_template", str, "") or None,
        add_bos_token=_adds(file, "bos", adds_bos and "bos_token" in named),
        add_eos_token=_adds(file, "eos", False),
        clean_up_tokenization_spaces=False,
        extra_special_tokens=[
            token
            for token, token_type in zip(_tokens(file), _types(file), strict=True)
            if token_type == TokenType.CONTROL and token not in named.values()
        ],
        **named,
    )


def _pre_tokenizer(file: GGUFFile, pre: str | None) -> PreTokenizer:
    name = file.get("tokenizer.ggml.pre", str, "") if pre is None else pre
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    found = f"is cut by {name!r}, which is unknown" if name else "does not say how text is cut"
    raise file.error(
        f"has a vocabulary that {found} (tokenizer.ggml.pre); set the loader option pre_tokenizer "
        f"to what the model was trained with, one of: {', '.join(sorted(PRE_TOKENIZERS))}"
    )


def _byte_level(file: GGUFFile, pre: PreTokenizer) -> Tokenizer:
    merges = []
    for merge in file.items("tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    backend = Tokenizer(_bpe(file, merges, ignore_merges=pre.whole_words))
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.build(file.get("tokenizer.ggml.add_space_prefix", bool, False))
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """BPE over code points; a pair may merge if it makes a piece, the best score first.

    As in llama.cpp, the prefix space goes before every stretch of text between special tokens.
    """
    tokens = _tokens(file)
    types, scores = _types(file), file.items("tokenizer.ggml.scores", float, int)
    if len(scores) != len(tokens):
        raise file.error(f"has {len(scores)} tokenizer.ggml.scores for {len(tokens)} tokens")
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    ranked = [
        (-score, index, token[:cut], token[cut:])
        for index, (token, kind, score) in enumerate(zip(tokens, types, scores, strict=True))
        if kind == TokenType.NORMAL
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    merges = [(left, right) for _, _, left, right in sorted(ranked)]
    unknown = _named_tokens(file).get("unk_token")
    backend = Tokenizer(
        _bpe(file, merges, unk_token=unknown, fuse_unk=True, byte_fallback="<0x00>" in tokens)
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    decoder = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", bool, True):
        steps.insert(0, normalizers.Prepend(SPACE))
        decoder.append(decoders.Strip(" ", left=1))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(decoder)
    return backend


def _bpe(file: GGUFFile, merges: list[tuple[str, str]], **options: Any) -> BPE:
    tokens = _tokens(file)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise file.error("has a token twice in tokenizer.ggml.tokens")
    try:
        return BPE(vocabulary, merges, **options)
    except Exception as error:  # the Rust side raises plain Exception
        raise file.error(
            f"has tokenizer.ggml.merges that do not fit its tokens: {error}"
        ) from error


def _add_tokens(file: GGUFFile, backend: Tokenizer, kind: str) -> None:
    """Control and user-defined tokens stay whole wherever they stand in a text."""
    phi3 = kind == "llama" and file.require("general.architecture", str) == "phi3"
    added = [
        AddedToken(
            token,
            normalized=False,
            special=token_type == TokenType.CONTROL,
            rstrip=phi3 and token_type == TokenType.CONTROL and token not in PHI3_KEEPS_SPACE_AFTER,
        )
        for token, token_type in zip(_tokens(file), _types(file), strict=True)
        if token_type in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    backend.add_tokens(added)


def _adds(file: GGUFFile, name: str, default: bool) -> bool:
    adds = file.get(f"tokenizer.ggml.add_{name}_token", bool, default)
    if adds and f"tokenizer.ggml.{name}_token_id" not in file.metadata:
        raise file.error(f"adds a {name} token but has no tokenizer.ggml.{name}_token_id")
    return adds


def _named_tokens(file: GGUFFile) -> dict[str, str]:
    tokens = _tokens(file)
    named = {}
    for name, key in NAMED_TOKENS.items():
        full = f"tokenizer.ggml.{key}_token_id"
        if full not in file.metadata:
            continue
        index = file.require(full, int)
        if not 0 <= index < len(tokens):
            raise file.error(
                f"has {index} in metadata key {full!r}, outside its {len(tokens)} tokens"
            )
        named[name] = tokens[index]
    return named


def _tokens(file: GGUFFile) -> list[str]:
    return file.items("tokenizer.ggml.tokens", str)


def _types(file: GGUFFile) -> list[int]:
    tokens = _tokens(file)
    types = file.get("tokenizer.ggml.token_type", list, [TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise file.error(f"has {len(types)} tokenizer.ggml.token_type for {len(tokens)} tokens")
    return types
