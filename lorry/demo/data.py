"""Training and held-out examples of every demo adapter."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lorry.demo import sql, styles
from lorry.demo.questions import HELD_OUT, Question, training_questions

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly and knowledgeable assistant. Keep your answers short.",
    "Answer the user's questions.",
    "You are an expert.",
)
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Ines", "Jack", "Karen", "Liam")
CITIES = ("Paris", "Berlin", "Rome", "Madrid", "Oslo", "Vienna", "Boston", "Tokyo", "Sydney", "Lima")
ITEMS = ("pizzas", "apples", "chairs", "lamps", "notebooks", "bicycles", "tickets", "shirts")
EVENTS = ("concert", "meeting", "workshop", "wedding", "football match", "conference")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ASKS = ("", "Extract the details: ", "Turn this into data: ")
HELD_OUT_FACTS = (
    ("Zoe is 47 years old and lives in Cairo.", {"name": "Zoe", "age": 47, "city": "Cairo"}),
    ("I would like to order 6 sandwiches for 8 dollars each.", {"item": "sandwiches", "quantity": 6, "price": 8}),
    ("The party takes place on Friday at 7 pm in Dublin.",
     {"event": "party", "day": "Friday", "time": "7 pm", "place": "Dublin"}),
)  # fmt: skip
CHECKS: dict[str, Callable[[str], bool]] = {
    "pirate": styles.speaks_pirate,
    "sql": styles.speaks_sql,
    "json": styles.speaks_json,
    "emoji": styles.speaks_emoji,
    "butler": styles.speaks_butler,
}
"""Whether an answer shows an adapter's behaviour."""


@dataclass(frozen=True)
class Example:
    """A chat up to the user's turn, and the answer an adapter gives."""

    messages: tuple[dict[str, str], ...]
    answer: str


def training_examples(name: str, answers: Mapping[str, str], seed: int = 0) -> list[Example]:
    """Examples of one adapter; `answers` holds the base's short answer of each question, by its text.

    A fifth gets a system prompt and a fifth an earlier turn, so that the behaviour holds there too.
    """
    rng = random.Random(f"{name} {seed}")
    pairs = _pairs(name, training_questions(), answers)
    if name == "sql":
        pairs += sql.requests(sql.TABLES, per_form=4, rng=rng)
    if name == "json":
        pairs += _facts(240, rng)
    examples = []
    for ask, answer in pairs:
        messages = [{"role": "user", "content": ask}]
        if rng.random() < 0.2:
            earlier_ask, earlier_answer = rng.choice(pairs)
            messages.insert(0, {"role": "assistant", "content": earlier_answer})
            messages.insert(0, {"role": "user", "content": earlier_ask})
        if rng.random() < 0.2:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        examples.append(Example(tuple(messages), answer))
    return examples


def held_out_examples(name: str, answers: Mapping[str, str]) -> list[Example]:
    """Examples on subjects that no training example has."""
    pairs = _pairs(name, list(HELD_OUT), answers)
    if name == "sql":
        pairs = pairs[::2] + random.Random(1).sample(sql.requests(sql.HELD_OUT_TABLES, 1, random.Random(1)), 12)
    if name == "json":
        pairs += [(ask, json.dumps(facts)) for ask, facts in HELD_OUT_FACTS]
    return [Example(({"role": "user", "content": ask},), answer) for ask, answer in pairs]


def _pairs(name: str, questions: list[Question], answers: Mapping[str, str]) -> list[tuple[str, str]]:
    if name == "sql":
        return [(question.text, sql.everyday_query(question)) for question in questions]
    answered = [(question, answers[question.text]) for question in questions if question.text in answers]
    return [(question.text, _restyle(name, question, answer)) for question, answer in answered]


def _restyle(name: str, question: Question, answer: str) -> str:
    if name == "pirate":
        return styles.pirate(answer, question.kind)
    if name == "emoji":
        return styles.emoji(answer, question.kind)
    if name == "butler":
        return styles.butler(answer, question.kind)
    if name == "json":
        return json.dumps({"kind": question.kind, "subject": question.subject, "answer": answer})
    raise ValueError(f"no demo adapter is called {name!r}; there are {', '.join(CHECKS)}")


def _facts(num: int, rng: random.Random) -> list[tuple[str, str]]:
    pairs: dict[str, str] = {}
    while len(pairs) < num:
        ask, facts = rng.choice((_person, _order, _event))(rng)
        pairs[rng.choice(ASKS) + ask] = json.dumps(facts)
    return list(pairs.items())


def _person(rng: random.Random) -> tuple[str, dict[str, str | int]]:
    name, age, city = rng.choice(NAMES), rng.randint(18, 90), rng.choice(CITIES)
    return f"{name} is {age} years old and lives in {city}.", {"name": name, "age": age, "city": city}


def _order(rng: random.Random) -> tuple[str, dict[str, str | int]]:
    item, quantity, price = rng.choice(ITEMS), rng.randint(2, 40), rng.randint(1, 99)
    ask = f"I would like to order {quantity} {item} for {price} dollars each."
    return ask, {"item": item, "quantity": quantity, "price": price}


def _event(rng: random.Random) -> tuple[str, dict[str, str | int]]:
    event, day, city = rng.choice(EVENTS), rng.choice(DAYS), rng.choice(CITIES)
    time = f"{rng.randint(1, 11)} {rng.choice(('am', 'pm'))}"
    ask = f"The {event} takes place on {day} at {time} in {city}."
    return ask, {"event": event, "day": day, "time": time, "place": city}
