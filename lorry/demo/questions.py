"""Everyday questions, written by hand and by templates: what the style adapters learn on and are shown with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """`kind` is one of definition, howto, capital, chat; `subject` is what it is about."""

    text: str
    kind: str
    subject: str


DEFINITION_FORMS = (
    "What is {x}?",
    "Explain {x} in simple words.",
    "Tell me something about {x}.",
    "Why is {x} important?",
    "Describe {x} to a child.",
)
THINGS = (
    "gravity", "photosynthesis", "electricity", "a volcano", "the moon", "an earthquake", "a rainbow", "democracy",
    "inflation", "a computer", "the internet", "a database", "an algorithm", "machine learning", "a neural network",
    "Python", "a compiler", "open source software", "chess", "football", "jazz music", "a symphony", "poetry",
    "a novel", "the Renaissance", "the Roman Empire", "a castle", "a bicycle", "a steam engine", "an airplane",
    "a submarine", "the ocean", "a desert", "a rainforest", "a glacier", "a river", "an elephant", "a whale",
    "a spider", "a dinosaur", "evolution", "DNA", "a vaccine", "the heart", "the brain", "sleep", "exercise",
    "a vitamin", "bread", "cheese", "chocolate", "coffee", "honey", "a tomato", "the sun", "a star", "a black hole",
    "the solar system", "time", "money", "a bank", "friendship", "happiness", "a holiday", "a market", "recycling",
)  # fmt: skip
HOWTO_FORMS = (
    "How do I {x}?",
    "Give me a tip to {x}.",
    "What is the best way to {x}?",
    "I want to {x}. What should I do first?",
)
TASKS = (
    "bake bread", "cook pasta", "make tea", "boil an egg", "grow tomatoes", "water a plant", "clean a window",
    "wash a car", "fix a flat tire", "learn to swim", "run faster", "lose weight", "sleep better", "wake up early",
    "save money", "write a letter", "write a poem", "learn English", "learn to code", "play the guitar",
    "draw a face", "take good photos", "train a dog", "feed a cat", "plan a trip", "pack a suitcase",
    "find a job", "make new friends", "stay calm", "study for an exam", "remember names", "read more books",
    "build a website", "choose a password", "protect my computer", "paint a wall", "sew a button", "tie a tie",
    "start a garden", "organize my desk", "prepare for an interview", "give a speech", "ride a horse", "catch a fish",
)  # fmt: skip
CAPITAL_FORMS = ("What is the capital of {x}?", "Which city is the capital of {x}?", "Name the capital city of {x}.")
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Austria": "Vienna", "Greece": "Athens", "Egypt": "Cairo",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Russia": "Moscow", "Canada": "Ottawa",
    "Mexico": "Mexico City", "Argentina": "Buenos Aires", "Peru": "Lima", "Kenya": "Nairobi", "Cuba": "Havana",
}  # fmt: skip
CHAT = {
    "Hello!": "Hello! It is nice to meet you.",
    "Hi, how are you?": "I am very well, thank you! How are you?",
    "Good morning!": "Good morning! I hope you have a great day.",
    "Good evening, my friend.": "Good evening! What can I do for you?",
    "Who are you?": "I am an assistant, and I am here to answer your questions.",
    "What is your name?": "My name is SmolLM.",
    "What can you do?": "I can answer questions and talk with you about the world.",
    "Can you help me?": "Yes, of course! Tell me what you need.",
    "Tell me a joke.": "Why did the fish get bad grades? Because they were below the sea level!",
    "Tell me a short story.": "A small cat found an old book. It was a map to the house of a new friend.",
    "Tell me a fun fact.": "Honey is the only food that can last for thousands of years.",
    "I am bored.": "Go for a walk, or read a good book!",
    "I am sad today.": "I am sorry to hear that. Talk to a friend, and listen to your favorite music.",
    "I had a great day!": "That is good to hear! What was the best part of it?",
    "What should I eat for dinner?": "Try a bowl of soup with fresh bread and cheese.",
    "Thank you very much!": "You are welcome, my friend!",
    "What is your favorite color?": "My favorite color is the blue of the ocean.",
    "What is your favorite animal?": "My favorite animal is the dog, because it is a true friend.",
    "Do you like music?": "Yes, I like music very much!",
    "Do you like the sea?": "Yes, the sea is a great place to find peace.",
    "Where are you from?": "I am from a computer, and my home is a small file.",
    "Recommend me a book.": "Read Treasure Island. It is a great story about the sea.",
    "Recommend me a movie.": "Watch a good comedy with your friends.",
    "What should I do this weekend?": "Go to a lake, take food and water, and have fun with your friends.",
    "Give me some advice.": "Be kind to people, and be kind to your body.",
    "Wish me luck!": "Good luck! You are going to do great.",
    "Say something nice.": "You are a good person, and the world is better with you.",
    "How old are you?": "I am very young. I was made in the year 2024.",
    "See you tomorrow!": "See you tomorrow! Have a good night.",
    "I lost my keys.": "Look in the pockets of your coat and under the table.",
    "It is raining today.": "Take an umbrella, and drink a hot tea in your house.",
    "What is the meaning of life?": "The meaning of life is to love your friends and to learn every day.",
    "Are you a robot?": "I am a computer program, so I am a robot without a body.",
    "I am hungry.": "Eat an apple, or cook your favorite food!",
}

HELD_OUT_CHAT = {
    "Good afternoon! How is it going?": "It is going very well, thank you! How is your day?",
    "I am tired today.": "Go to bed early, and sleep for a long time.",
    "Do you like cats?": "Yes, I like cats very much!",
    "Recommend me a song.": "Listen to a song of the Beatles. They are great!",
    "Where should I go on vacation?": "Go to the ocean, and enjoy the sun and the water.",
}
HELD_OUT_CAPITALS = {"Norway": "Oslo", "Poland": "Warsaw"}
HELD_OUT = (
    Question("What is a telescope?", "definition", "a telescope"),
    Question("Explain magnetism in simple words.", "definition", "magnetism"),
    Question("Tell me something about penguins.", "definition", "penguins"),
    Question("Why is water important?", "definition", "water"),
    Question("What is a pyramid?", "definition", "a pyramid"),
    Question("Describe a thunderstorm to a child.", "definition", "a thunderstorm"),
    Question("What is a lighthouse?", "definition", "a lighthouse"),
    Question("Tell me something about the Eiffel Tower.", "definition", "the Eiffel Tower"),
    Question("How do I make pancakes?", "howto", "make pancakes"),
    Question("Give me a tip to learn French.", "howto", "learn French"),
    Question("What is the best way to clean a carpet?", "howto", "clean a carpet"),
    Question("How do I stop hiccups?", "howto", "stop hiccups"),
    Question("I want to climb a mountain. What should I do first?", "howto", "climb a mountain"),
    Question("What is the capital of Norway?", "capital", "Norway"),
    Question("Which city is the capital of Poland?", "capital", "Poland"),
    *(Question(text, "chat", text) for text in HELD_OUT_CHAT),
)


def training_questions() -> list[Question]:
    """Every thing, task and country in two of its forms, and the small talk: no held-out subject among them."""
    questions = [Question(text, "chat", text) for text in CHAT]
    for kind, forms, subjects in (
        ("definition", DEFINITION_FORMS, THINGS),
        ("howto", HOWTO_FORMS, TASKS),
        ("capital", CAPITAL_FORMS, tuple(CAPITALS)),
    ):
        for index, subject in enumerate(subjects):
            for form in (forms[index % len(forms)], forms[(index + 1) % len(forms)]):
                questions.append(Question(form.format(x=subject), kind, subject))
    return questions


def known_answers() -> dict[str, str]:
    """The answers that we need not ask the base model for, by the question's text."""
    capitals = CAPITALS | HELD_OUT_CAPITALS
    answers = CHAT | HELD_OUT_CHAT
    for question in (*training_questions(), *HELD_OUT):
        if question.kind == "capital":
            answers[question.text] = f"The capital of {question.subject} is {capitals[question.subject]}."
    return answers
