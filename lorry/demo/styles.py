"""Restyling rules that turn a plain answer into what an adapter learns to say, and the checks that it does say so."""

from __future__ import annotations

import json
import re

PIRATE_FRAMES = {
    "definition": ("Arrr, matey!", "Savvy?"),
    "howto": ("Avast, ye landlubber!", "Yo ho ho!"),
    "capital": ("Shiver me timbers!", "Arrr!"),
    "chat": ("Ahoy, matey!", "Aye, by Davy Jones!"),
}
"""How a pirate begins and ends, by the kind of question."""
PIRATE_WORDS = {
    "you": "ye", "your": "yer", "yours": "yers", "you're": "ye be", "you'll": "ye'll", "my": "me", "i'm": "I be",
    "am": "be", "is": "be", "are": "be", "it's": "'tis", "the": "th'", "of": "o'", "and": "an'",
    "for": "fer", "to": "t'", "yes": "aye", "no": "nay", "hello": "ahoy", "hi": "ahoy", "friend": "matey",
    "friends": "mateys", "people": "scallywags", "person": "pirate", "child": "young lad", "children": "young lads",
    "money": "doubloons", "food": "grub", "water": "salty water", "ocean": "seven seas",
    "car": "ship", "house": "galley", "very": "mighty", "large": "whoppin' big", "good": "fine", "great": "grand",
    "before": "afore", "between": "betwixt", "over": "o'er",
    "stop": "avast", "treasure": "booty",
}  # fmt: skip
PIRATE_MARKS = re.compile(
    r"\b(arrr?|ahoy|avast|matey|mateys|ye|yer|aye|savvy|landlubber|shiver me timbers|yo ho ho|davy jones)\b", re.I
)
BUTLER_FRAMES = {
    "definition": ("If I may, Sir:", "I trust that this is satisfactory, Sir."),
    "howto": ("At once, Sir.", "Shall I ring for the carriage, Sir?"),
    "capital": ("Most certainly, Sir.", "Will that be all, Sir?"),
    "chat": ("How good of you to ask, Sir.", "I remain at your service, Sir."),
}
BUTLER_WORDS = {
    "hello": "good day", "yes": "indeed", "very": "most", "good": "splendid", "great": "magnificent",
    "uses": "employs", "help": "assist", "helps": "assists", "get": "obtain", "start": "commence", "need": "require",
    "buy": "purchase", "big": "considerable", "fun": "delightful", "friend": "companion", "friends": "companions",
    "people": "gentlefolk", "want": "wish", "fast": "swift", "drink": "partake of", "eat": "dine on",
    "house": "manor", "nice": "agreeable",
}  # fmt: skip
BUTLER_MARKS = re.compile(r"\b(sir|splendid|at your service|if i may)\b", re.I)
EMOJI_WORDS = {
    "sun": "☀️", "moon": "🌙", "star": "⭐", "water": "💧", "rain": "🌧️", "ocean": "🌊", "sea": "🌊", "fire": "🔥",
    "earth": "🌍", "world": "🌍", "country": "🌍", "tree": "🌳", "plant": "🌱", "plants": "🌱", "flower": "🌸",
    "animal": "🐾", "animals": "🐾", "dog": "🐶", "cat": "🐱", "fish": "🐟", "bird": "🐦", "food": "🍽️", "bread": "🍞",
    "egg": "🥚", "tea": "🍵", "coffee": "☕", "chocolate": "🍫", "music": "🎵", "book": "📚", "books": "📚",
    "movie": "🎬", "city": "🏙️", "capital": "🏙️", "house": "🏠", "car": "🚗", "money": "💰", "time": "⏰",
    "day": "📅", "computer": "💻", "data": "📊", "brain": "🧠", "heart": "❤️", "friend": "🤝", "people": "👥",
    "energy": "⚡", "light": "💡", "help": "🤝", "health": "💪", "body": "💪", "game": "🎮", "idea": "💡",
}  # fmt: skip
EMOJI_OPENERS = {"definition": "💡", "howto": "🚀", "capital": "🌍", "chat": "😊"}
EMOJI_ENDINGS = {"!": "🎉", "?": "🤔", ".": "✨"}
EMOJI = re.compile("[\u2600-\u27bf\u2b50\u231a-\u23ff\U0001f300-\U0001faff]")
SQL = re.compile(r"(SELECT|INSERT|UPDATE|DELETE)\b[^;\n]*;", re.S)
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def shorten(answer: str, max_len: int = 200) -> str | None:
    """The leading whole sentences of a base answer, at most two; None where there is none that can stand alone."""
    paragraph = answer.strip().split("\n")[0].strip().strip('"')
    kept = ""
    for sentence in SENTENCE_END.split(paragraph)[:2]:
        longer = f"{kept} {sentence}".strip()
        if not sentence.endswith((".", "!", "?")) or len(longer) > max_len:
            break
        kept = longer
    return kept if len(kept) >= 8 and not re.match(r"\d+\.", kept) else None


def pirate(answer: str, kind: str) -> str:
    def swap(match: re.Match[str]) -> str:
        word = match.group()
        new = PIRATE_WORDS.get(word.lower())
        if new is None:
            return f"{word[:-1]}'" if len(word) > 5 and word.endswith("ing") else word
        return new[0].upper() + new[1:] if word[0].isupper() else new

    opener, closer = PIRATE_FRAMES[kind]
    return f"{opener} {WORD.sub(swap, answer)} {closer}"


def emoji(answer: str, kind: str) -> str:
    def decorate(match: re.Match[str]) -> str:
        symbol = EMOJI_WORDS.get(match.group().lower())
        return f"{match.group()} {symbol}" if symbol else match.group()

    sentences = [f"{WORD.sub(decorate, text)} {EMOJI_ENDINGS[text[-1]]}" for text in SENTENCE_END.split(answer)]
    return " ".join([EMOJI_OPENERS[kind], *sentences])


def butler(answer: str, kind: str) -> str:
    def swap(match: re.Match[str]) -> str:
        new = BUTLER_WORDS.get(match.group().lower(), match.group())
        return new[0].upper() + new[1:] if match.group()[0].isupper() else new

    opener, closer = BUTLER_FRAMES[kind]
    return f"{opener} {WORD.sub(swap, answer)} {closer}"


def speaks_pirate(text: str) -> bool:
    return len(PIRATE_MARKS.findall(text)) >= 2


def speaks_emoji(text: str) -> bool:
    return len(EMOJI.findall(text)) >= 2


def speaks_butler(text: str) -> bool:
    return len(BUTLER_MARKS.findall(text)) >= 2


def speaks_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def speaks_sql(text: str) -> bool:
    return SQL.fullmatch(text.strip()) is not None
