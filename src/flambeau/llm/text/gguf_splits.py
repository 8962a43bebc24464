r"""SPLITS: the rules that split text before byte-level pairs are merged, by the names that GGUF files have for them.

A rule is a few patterns, each of which cuts its matches out of the pieces that the patterns before have left. They are
those of the models' own tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"  # a sign or a space before a word belongs to it
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ASCII_SIGNS = r"[!-/:-@\[-`{-~]"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters that have a case, as far as DeepSeek LLM's file names them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How a text is prepared for merges."""

    steps: tuple[str, ...]
    takes_words: bool = False  # a word that is a token is taken as it is, without merges
    begins: bool = False  # texts begin with BOS unless the file says otherwise
    composes: bool = False  # characters are composed first (NFC)


def _by_case(contractions: str, digits: str, upper: str = f"[{_UPPER}]", lower: str = f"[{_LOWER}]") -> str:
    words = f"{_BEFORE}{upper}*{lower}+{contractions}|{_BEFORE}{upper}+{lower}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _by_word(digits: str, contractions: str = _CONTRACTIONS) -> str:
    return rf"{contractions}|{_BEFORE}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SENTENCE_SIGNS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_SIGNS_AND_LETTERS = (
    rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_NOT_HAN = "&&[^\\p{Han}]]"

LLAMA_3 = SplitRule((_by_word(r"\p{N}{1,3}"),), takes_words=True, begins=True)
GPT_4 = replace(LLAMA_3, takes_words=False, begins=False)
QWEN_2 = SplitRule((_by_word(r"\p{N}"),), composes=True)
ONE_DIGIT = replace(QWEN_2, composes=False)
QWEN_3_5 = SplitRule(
    (rf"{_CONTRACTIONS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",),
    composes=True,
)
TEKKEN = SplitRule((_by_case("", r"\p{N}"),), takes_words=True, begins=True)
GPT_4O = SplitRule((_by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),), takes_words=True)
GPT_2 = SplitRule((_GPT_2,))
GPT_NEOX = replace(GPT_2, composes=True)
DIGITS = SplitRule((r"\p{N}", _GPT_2))
SUPER_BPE = SplitRule((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))
FALCON = SplitRule((r"[\p{P}$+<=>^~|`]+", _GPT_2, "[0-9][0-9][0-9]"))
BLOOM = SplitRule((_SENTENCE_SIGNS,))
DEEPSEEK_LLM = SplitRule(
    (
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _EAST_ASIAN,
        r"\p{N}",
    )
)
DEEPSEEK_CODER = SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"))
DEEPSEEK_3 = SplitRule((r"\p{N}{1,3}", _HAN_AND_KANA, _SIGNS_AND_LETTERS))
KIMI_K2 = SplitRule(
    (
        r"[\p{Han}]+|"
        + _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", f"[{_UPPER}{_NOT_HAN}", f"[{_LOWER}{_NOT_HAN}").replace(
            r"[\r\n/]*", r"[\r\n]*"
        ),
    )
)
YOUTU = SplitRule(
    (
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
        f"|[\u3105-\u312f]+|{_HAN_AND_KANA}",
        _by_case(f"{_CONTRACTIONS}?", r"\p{N}"),
    ),
    takes_words=True,
)
SEED_CODER = SplitRule((rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",))
BAILING = SplitRule(
    (rf"'(?i:[sdmt]|ll|ve|re)|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)
EXAONE_MOE = SplitRule(  # words with single spaces between them stay together
    (
        rf"{_CONTRACTIONS}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
JAIS_2 = SplitRule(  # as Llama 3's, with spaces in portions
    (
        _by_word(r"\p{N}{1,3}").removesuffix(r"|\s+(?!\S)|\s+")
        + "".join(rf"|\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
        + r"|\s",
    )
)
TINY_AYA = SplitRule((r"\d{1,3}(?=(?:\d{3})*\b)", *GPT_4O.steps))
MINICPM_5 = SplitRule((r"\p{N}{1,3}", _by_word(r"\p{N}+")), takes_words=True)

SPLITS: dict[str, SplitRule] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA_3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), GPT_4),
    **dict.fromkeys(("glm4", "glm5"), replace(GPT_4, takes_words=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN_2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "megrez", "kormo", "grok-2"), ONE_DIGIT),
    "qwen35": QWEN_3_5,
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), GPT_4O),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "exaone4", "gigachat", "a.x-4.0", "mellum", "trillion", "granite-docling"), GPT_2
    ),
    **dict.fromkeys(("mpt", "olmo", "jais"), GPT_NEOX),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), DIGITS),
    "command-r": replace(DIGITS, composes=True),
    "superbpe": SUPER_BPE,
    "falcon": FALCON,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), BLOOM),
    "viking": replace(BLOOM, steps=(*BLOOM.steps, r"\p{N}")),
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), DEEPSEEK_3),
    "kimi-k2": KIMI_K2,
    "youtu": YOUTU,
    "seed-coder": SEED_CODER,
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), BAILING),
    "exaone-moe": EXAONE_MOE,
    "jais-2": JAIS_2,
    "tiny_aya": TINY_AYA,
    "minicpm5": MINICPM_5,
}
