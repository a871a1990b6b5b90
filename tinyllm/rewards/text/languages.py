"""Which language a text is in: by script, then by its commonest words. Deterministic; None when it cannot be told."""

from __future__ import annotations

import re
import unicodedata

SCRIPTS = {
    "hi": "DEVANAGARI",
    "bn": "BENGALI",
    "ta": "TAMIL",
    "te": "TELUGU",
    "kn": "KANNADA",
    "gu": "GUJARATI",
    "ml": "MALAYALAM",
    "pa": "GURMUKHI",
    "th": "THAI",
    "ko": "HANGUL",
    "he": "HEBREW",
    "el": "GREEK",
    "hy": "ARMENIAN",
    "ka": "GEORGIAN",
}
"""Languages told by their script alone."""
COMMON = {
    "en": "the of and to in is that it for was on are with as be this you not have from but they his her will an or",
    "de": "der die das und ist nicht ein eine ich zu den mit von sie auf es im für dem auch wir des sich als wie",
    "fr": "le la les et des est une un dans que pour pas qui sur au avec ce il vous nous du je sont plus ne cette",
    "es": "el la los las y es en que de un una por con no para se su lo como más pero al del está son",
    "pt": "o a os as e é em que de um uma por com não para se do da no na mais como mas ao são está",
    "it": "il la le gli e è di che un una per non con si del della in sono più come ma al nel anche questo",
    "nl": "de het een en is van dat niet in op te met voor zijn er aan ook als maar naar door wordt deze bij",
    "pl": "i w na nie jest to się z do że jak o ale po co tak za od czy dla przez są był oraz tego",
    "fi": "ja on ei se että hän oli mutta ovat myös kun niin joka sen tämä olen voi ole kuin vain sekä",
    "sv": "och i att det som en är av för på med inte den till ett om har de men var jag kan eller",
    "sw": "na ya wa kwa ni katika za la kuwa hii cha kama si yake hiyo lakini pia watu ambayo huu sana",
    "vi": "và của là có không được cho một các trong với những để này người tôi đã khi",
    "tr": "ve bir bu da de için ile çok ne daha olarak var gibi ama ben o olan kadar değil sonra",
    "ru": "и в не на что я с он как это по но из для так все его этот или только был",
    "uk": "і в не на що це з та до як для але й він є від або цей також його був",
    "bg": "и на е да в за се от не с по това но са той като или тази съм ще беше",
    "ar": "في من على أن إلى هذا التي و لا هذه ذلك كان عن مع هو ما الذي هي أو",
    "fa": "و در به از که این را با است برای آن یک می شد های خود تا بر هم",
    "ur": "کے کی ہے میں سے کا اور کو ہیں پر یہ نے کہ اس بھی ایک تھا وہ",
    "mr": "आहे आणि या ते मध्ये ही हे त्या करण्यासाठी नाही एक होते आहेत तर",
    "ne": "छ र यो को हो मा लाई गर्न पनि छन् ले भएको त्यो थियो हरु",
    "hi": "है के में की और से का को हैं यह नहीं पर ने एक भी था कि लिए",
}  # fmt: skip
"""The commonest words of languages that share a script."""
GROUPS = {
    "LATIN": ("en", "de", "fr", "es", "pt", "it", "nl", "pl", "fi", "sv", "sw", "vi", "tr"),
    "CYRILLIC": ("ru", "uk", "bg"),
    "ARABIC": ("ar", "fa", "ur"),
    "DEVANAGARI": ("hi", "mr", "ne"),
}
LANGUAGES = frozenset([*SCRIPTS, *COMMON, "ja", "zh"])
MAX_CHARS = 4_000
"""The start of a text decides."""
_COMMON = {language: frozenset(words.split()) for language, words in COMMON.items()}
_WORDS = re.compile(r"[^\W\d_]+(?:[\u0300-\u036f\u0900-\u0963\u064b-\u0652]+[^\W\d_]*)*")


def language_of(text: str) -> str | None:
    """The ISO 639-1 code of the language most of the text is in; None when it is too short or mixed to tell."""
    counts: dict[str, int] = {}
    for char in text[:MAX_CHARS]:
        if char.isalpha():
            script = unicodedata.name(char, "?").split()[0]
            counts[script] = counts.get(script, 0) + 1
    if not counts:
        return None
    total = sum(counts.values())
    if counts.get("HIRAGANA", 0) + counts.get("KATAKANA", 0) > 0.05 * total:
        return "ja"
    script = max(counts, key=lambda name: (counts[name], name))
    if counts[script] < 0.6 * total:
        return None
    if script == "CJK":
        return "zh"
    if script not in GROUPS:
        return next((language for language, name in SCRIPTS.items() if name == script), None)
    words = [word.casefold() for word in _WORDS.findall(text[:MAX_CHARS])]
    scores = sorted(((sum(word in _COMMON[name] for word in words), name) for name in GROUPS[script]), reverse=True)
    (best, language), (second, _) = scores[0], scores[1]
    return language if best > second and best >= 0.08 * len(words) else None
