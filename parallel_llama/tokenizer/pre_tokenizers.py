"""How byte-level BPE models split text before merging, by the names of the rules in GGUF files.

The patterns are for the `tokenizers` library, where `&&` is the intersection of two classes.

Source: the models' tokenizer.json files; names, whole words, bos and the default as in llama.cpp's
src/llama-vocab.cpp.
"""

from typing import NamedTuple


class PreTokenizer(NamedTuple):
    """One rule.

    Args:
        patterns: applied in order; each splits the pieces of the previous one.
        whole_words: whether a piece that is a token is kept whole.
        adds_bos: default if the file does not say.
        composes: whether a text is first normalised to NFC, as the models' own tokenizers do and
            llama.cpp does not.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False


LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2 = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _words_by_case(ending: str, digits: str) -> str:
    """A pattern that starts a new word at an upper-case letter after a lower-case letter."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# DeepSeek lists its letters explicitly: upper and lower case letters in these blocks, without the
# lower-case letters of Georgian and Armenian, and without mathematical letters.
_DEEPSEEK_BLOCKS = (
    "\0-\u055f\u0589-\u10c6\u1100-\u1c7f\u1c90-\u2cff\u2d2e-\ua78f\uab70-\uffff"
    "\U00010400-\U000104ff\U00010c80-\U00010cff\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_EASTERN = "[\u0800-\u9fa5\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[{_DEEPSEEK_BLOCKS}]]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_EASTERN,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_EASTERN, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_RULES: dict[PreTokenizer, str] = {
    PreTokenizer((r"[\p{P}$+<=>^~|]+", GPT2_PATTERN, r"\p{N}+", r"[0-9]{3}")): "default",
    PreTokenizer((r"[\p{P}$+<=>^~|`]+", GPT2_PATTERN, r"[0-9]{3}")): "falcon",
    PreTokenizer((GPT2_PATTERN,)): (
        "gpt-2 phi-2 jais trillion mellum exaone4 gigachat a.x-4.0 granite-docling"
    ),
    PreTokenizer((GPT2_PATTERN,), composes=True): "olmo mpt",
    PreTokenizer((r"\p{N}", GPT2_PATTERN)): (
        "smollm starcoder refact codeshell exaone minerva-7b mellum2"
    ),
    PreTokenizer((r"\p{N}", GPT2_PATTERN), composes=True): "command-r",
    PreTokenizer((LLAMA3_PATTERN,), whole_words=True, adds_bos=True): (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"
    ),
    PreTokenizer((LLAMA3_PATTERN,), whole_words=True): "glm4 glm5",
    PreTokenizer((LLAMA3_PATTERN,)): "dbrx smaug-bpe chatglm-bpe",
    PreTokenizer((r"\p{N}{1,3}", LLAMA3_PATTERN), whole_words=True): "minicpm5",
    PreTokenizer((_QWEN2,), composes=True): "qwen2",
    PreTokenizer((_QWEN2,)): ("deepseek-r1-qwen stablelm2 megrez kormo hunyuan solar-open grok-2"),
    PreTokenizer(
        (_QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}"),),
        composes=True,
    ): "qwen35",
    PreTokenizer((_QWEN2.replace(r"]+[\r\n]*", "]+"),)): "seed-coder",
    PreTokenizer((_QWEN2.removeprefix(_CONTRACTIONS + "|"),)): "ufakzeka",
    PreTokenizer((_words_by_case("", r"\p{N}"),), whole_words=True, adds_bos=True): "tekken",
    PreTokenizer((_words_by_case(_CONTRACTIONS + "?", r"\p{N}{1,3}"),)): (
        "gpt-4o llama4 kanana2 talkie minimax-m2"
    ),
    PreTokenizer((_BLOOM,)): "bloom poro-chat gpt3-finnish",
    PreTokenizer((_BLOOM, r"\p{N}")): "viking",
    PreTokenizer(_DEEPSEEK_LLM): "deepseek-llm",
    PreTokenizer(_DEEPSEEK_CODER): "deepseek-coder",
    PreTokenizer(_DEEPSEEK_V3): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
}
PRE_TOKENIZERS = {name: rule for rule, names in _RULES.items() for name in names.split()}
