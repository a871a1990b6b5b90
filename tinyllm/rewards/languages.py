"""Which language a text is in: by script, then by its commonest words. Deterministic; None when it cannot be told."""

from __future__ import annotations

import re
import unicodedata

SCRIPTS = {
    "hi": "DEVANAGARI", "bn": "BENGALI", "ta": "TAMIL", "te": "TELUGU", "kn": "KANNADA", "gu": "GUJARATI", "ml": "MALAYALAM",
    "pa": "GURMUKHI", "th": "THAI", "ko": "HANGUL", "he": "HEBREW", "el": "GREEK", "hy": "ARMENIAN", "ka": "GEORGIAN",
}  # fmt: skip
"""Languages told by their script alone."""
COMMON = {
    "en": "the of and to in is that it for was on are with as be this you not have from but they his her will an or",
    "de": "der die das und ist nicht ein eine ich zu den mit von sie auf es im f\u00fcr dem auch wir des sich als wie",
    "fr": "le la les et des est une un dans que pour pas qui sur au avec ce il vous nous du je sont plus ne cette",
    "es": "el la los las y es en que de un una por con no para se su lo como m\u00e1s pero al del est\u00e1 son",
    "pt": "o a os as e \u00e9 em que de um uma por com n\u00e3o para se do da no na mais como mas ao s\u00e3o est\u00e1",
    "it": "il la le gli e \u00e8 di che un una per non con si del della in sono pi\u00f9 come ma al nel anche questo",
    "nl": "de het een en is van dat niet in op te met voor zijn er aan ook als maar naar door wordt deze bij",
    "pl": "i w na nie jest to si\u0119 z do \u017ce jak o ale po co tak za od czy dla przez s\u0105 by\u0142 oraz tego",
    "fi": "ja on ei se ett\u00e4 h\u00e4n oli mutta ovat my\u00f6s kun niin joka sen t\u00e4m\u00e4 olen voi ole kuin vain sek\u00e4",
    "sv": "och i att det som en \u00e4r av f\u00f6r p\u00e5 med inte den till ett om har de men var jag kan eller",
    "sw": "na ya wa kwa ni katika za la kuwa hii cha kama si yake hiyo lakini pia watu ambayo huu sana",
    "vi": "v\u00e0 c\u1ee7a l\u00e0 c\u00f3 kh\u00f4ng \u0111\u01b0\u1ee3c cho m\u1ed9t c\u00e1c trong v\u1edbi nh\u1eefng \u0111\u1ec3 n\u00e0y ng\u01b0\u1eddi t\u00f4i \u0111\u00e3 khi",
    "tr": "ve bir bu da de i\u00e7in ile \u00e7ok ne daha olarak var gibi ama ben o olan kadar de\u011fil sonra",
    "ru": "\u0438 \u0432 \u043d\u0435 \u043d\u0430 \u0447\u0442\u043e \u044f \u0441 \u043e\u043d \u043a\u0430\u043a \u044d\u0442\u043e \u043f\u043e \u043d\u043e \u0438\u0437 \u0434\u043b\u044f \u0442\u0430\u043a \u0432\u0441\u0435 \u0435\u0433\u043e \u044d\u0442\u043e\u0442 \u0438\u043b\u0438 \u0442\u043e\u043b\u044c\u043a\u043e \u0431\u044b\u043b",
    "uk": "\u0456 \u0432 \u043d\u0435 \u043d\u0430 \u0449\u043e \u0446\u0435 \u0437 \u0442\u0430 \u0434\u043e \u044f\u043a \u0434\u043b\u044f \u0430\u043b\u0435 \u0439 \u0432\u0456\u043d \u0454 \u0432\u0456\u0434 \u0430\u0431\u043e \u0446\u0435\u0439 \u0442\u0430\u043a\u043e\u0436 \u0439\u043e\u0433\u043e \u0431\u0443\u0432",
    "bg": "\u0438 \u043d\u0430 \u0435 \u0434\u0430 \u0432 \u0437\u0430 \u0441\u0435 \u043e\u0442 \u043d\u0435 \u0441 \u043f\u043e \u0442\u043e\u0432\u0430 \u043d\u043e \u0441\u0430 \u0442\u043e\u0439 \u043a\u0430\u0442\u043e \u0438\u043b\u0438 \u0442\u0430\u0437\u0438 \u0441\u044a\u043c \u0449\u0435 \u0431\u0435\u0448\u0435",
    "ar": "\u0641\u064a \u0645\u0646 \u0639\u0644\u0649 \u0623\u0646 \u0625\u0644\u0649 \u0647\u0630\u0627 \u0627\u0644\u062a\u064a \u0648 \u0644\u0627 \u0647\u0630\u0647 \u0630\u0644\u0643 \u0643\u0627\u0646 \u0639\u0646 \u0645\u0639 \u0647\u0648 \u0645\u0627 \u0627\u0644\u0630\u064a \u0647\u064a \u0623\u0648",
    "fa": "\u0648 \u062f\u0631 \u0628\u0647 \u0627\u0632 \u06a9\u0647 \u0627\u06cc\u0646 \u0631\u0627 \u0628\u0627 \u0627\u0633\u062a \u0628\u0631\u0627\u06cc \u0622\u0646 \u06cc\u06a9 \u0645\u06cc \u0634\u062f \u0647\u0627\u06cc \u062e\u0648\u062f \u062a\u0627 \u0628\u0631 \u0647\u0645",
    "ur": "\u06a9\u06d2 \u06a9\u06cc \u06c1\u06d2 \u0645\u06cc\u06ba \u0633\u06d2 \u06a9\u0627 \u0627\u0648\u0631 \u06a9\u0648 \u06c1\u06cc\u06ba \u067e\u0631 \u06cc\u06c1 \u0646\u06d2 \u06a9\u06c1 \u0627\u0633 \u0628\u06be\u06cc \u0627\u06cc\u06a9 \u062a\u06be\u0627 \u0648\u06c1",
    "mr": "\u0906\u0939\u0947 \u0906\u0923\u093f \u092f\u093e \u0924\u0947 \u092e\u0927\u094d\u092f\u0947 \u0939\u0940 \u0939\u0947 \u0924\u094d\u092f\u093e \u0915\u0930\u0923\u094d\u092f\u093e\u0938\u093e\u0920\u0940 \u0928\u093e\u0939\u0940 \u090f\u0915 \u0939\u094b\u0924\u0947 \u0906\u0939\u0947\u0924 \u0924\u0930",
    "ne": "\u091b \u0930 \u092f\u094b \u0915\u094b \u0939\u094b \u092e\u093e \u0932\u093e\u0908 \u0917\u0930\u094d\u0928 \u092a\u0928\u093f \u091b\u0928\u094d \u0932\u0947 \u092d\u090f\u0915\u094b \u0924\u094d\u092f\u094b \u0925\u093f\u092f\u094b \u0939\u0930\u0941",
    "hi": "\u0939\u0948 \u0915\u0947 \u092e\u0947\u0902 \u0915\u0940 \u0914\u0930 \u0938\u0947 \u0915\u093e \u0915\u094b \u0939\u0948\u0902 \u092f\u0939 \u0928\u0939\u0940\u0902 \u092a\u0930 \u0928\u0947 \u090f\u0915 \u092d\u0940 \u0925\u093e \u0915\u093f \u0932\u093f\u090f",
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
