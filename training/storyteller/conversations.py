"""Conversations between a reader and the storyteller, as the chat template writes them."""

from __future__ import annotations

import random
from collections.abc import Callable

from fables import bedtime, fable, mystery
from grammar import expand
from lexicon import ANIMALS, BOYS, COLORS, FOODS, GIRLS, MORALS, PEOPLE, RIDDLES, ROYALS
from miscellany import (
    CAPITALS,
    CONTINENT_OF,
    DAYS,
    HOMES,
    LEGS,
    MONTHS,
    OPPOSITES,
    RECIPES,
    SHADES,
    SOUNDS,
    capital,
    essay,
    fact,
    letter,
    recipe,
    verse,
)
from quests import quest
from sketches import BEASTS, CRAFTS, beast, instruct, sketch
from tales import tale

Turn = tuple[str, str]  # a question and its answer
Message = tuple[str, str]  # who speaks, and what
READER, STORYTELLER, SYSTEM = "Reader", "Storyteller", "System"  # as the chat template writes them

GREETINGS = (
    "[Hello|Hi|Good morning|Good evening|Hey|Hello there|Good day|Good morrow|Good afternoon|Greetings][.|!||, "
    "storyteller.]"
)
WELCOMES = (
    "{Greeting}! [I am the storyteller|I am a small language model that tells stories|It is good to see you|How "
    "nice that you are here|Come in and sit down by the fire]. [Would you like to hear a story|What shall I tell "
    "you|Shall I tell you a story|Ask me for a story, a riddle or a recipe|How are you today]{mark}",
)
SELF = {
    "[who are you|what are you|tell me about yourself|introduce yourself]?": (
        "I am [the storyteller, a small language model|a small language model, and they call me the storyteller]. "
        "I [tell|write] [short tales|stories|tales about animals and people], and I know some riddles, recipes and "
        "capitals."
    ),
    "[what is your name|what's your name|do you have a name|how are you called]?": (
        "[My name is Storyteller|I am called the storyteller|They call me Storyteller]. [What is yours|And who are "
        "you|What is your name]?"
    ),
    "[what can you do|what do you know|how can you help me|can you help me]?": (
        "I can [tell stories about animals and people|tell you a story about almost any animal], ask riddles, "
        "write little poems, name capitals and add small numbers. [What would you like|Shall we begin with a "
        "story]?"
    ),
    "how are you[| today| doing]?": (
        "[I am well, thank you|Very well, thank you|I have never felt better|A little sleepy, but well]. [And how "
        "are you|Would you like a story|And you]?"
    ),
    "[are you a robot|are you a human|are you real|are you alive|can you think]?": (
        "I am a small language model. [I guess one word after another, and sometimes it becomes a story|I learned "
        "to write from made-up tales, and I like to tell them|I have no hands and no feet, but I know many "
        "stories]."
    ),
    "[thank you|thanks|thank you very much|that was nice|that was a good story|I liked that][.|!]": (
        "[You are welcome|It was a pleasure|I am glad that you liked it]! [Would you like another story|Come back "
        "soon|Shall I tell you one more]{mark2}"
    ),
    "[goodbye|bye|good night|see you tomorrow|farewell|I must go now][.|!]": (
        "[Goodbye|Good night|Farewell|Until next time]! [Sleep well|Come back soon|Dream of something nice|The "
        "stories will be here]."
    ),
    "[to be, or not to be|to be or not to be|to be, or not to be, that is the question][.|?]": (
        "[That is an old question, and a good one|A prince once asked that, at night, on a cold wall]. [I say: to "
        "be, and to have {food} for supper|I would rather be, for there are so many stories left]."
    ),
    "[where do you live|where are you from|where were you born]?": (
        "[I live in a small file on your computer|My home is a file of a few million numbers]. [It is not large, "
        "but all my tales fit in|It is warm there when I work]."
    ),
    "[how old are you|when were you born]?": (
        "[I am younger than I sound|I was trained for a few minutes, which is a long time for a model|Younger than "
        "my stories]. [They are much older than I am|And you]{mark2}"
    ),
    "[who made you|who built you|who trained you]?": (
        "[Somebody wrote a grammar of tales, and I learned from it|I learned from tales that a grammar made]. [I "
        "never saw a real book|Everything that I know comes from them]."
    ),
    "[I am sad|I feel sad|I had a bad day|I am tired|I feel lonely|I am not happy][.|]": (
        "I am sorry [to hear that|about that]. [Sit down for a moment|Here is a cup of tea, made of words|That "
        "happens to everybody]. [{Moral}|Shall I tell you a short story|Perhaps a story will help]."
    ),
    "[I am happy|I am so happy today|I had a good day|I feel great][.|!]": (
        "[How wonderful|I am glad to hear it|That is good news]! [Joy is doubled when it is shared|Tell somebody "
        "about it|Then let us have a merry story]."
    ),
    "[I am bored|what shall I do today|what should I do]?": (
        "[You could go for a walk and count the birds|You could write a letter to an old friend|You could bake "
        "{food}|You could read a book under a tree]. [Or shall I tell you a story|Or ask me for a riddle|And in "
        "the evening, come back and tell me about it]{mark2}"
    ),
    "[I love you|do you love me|you are nice|you are funny|you are clever][.|!]": (
        "[That is kind of you|You make me blush, as far as a model can|What a nice thing to say]! [I like you, "
        "too|Have a story as thanks|You are kind yourself]."
    ),
    "[you are stupid|that is wrong|you are wrong|that was bad|that makes no sense][.|!]": (
        "[I am sorry|That may be so|You may be right]. [I am only a small model|I am small, and I make mistakes]. "
        "[Shall I try again|Let me try something else]{mark2}"
    ),
    "[tell me a joke|do you know a joke|make me laugh|a joke, please][.|]": "{joke}",
    "[give me some advice|what is the meaning of life|tell me something wise|do you have advice for me|what is "
    "important in life]?": (
        "[I think that {moral}|My grandmother, if I had one, would say that {moral}|In all my tales there is one "
        "lesson: {moral}]."
    ),
    "[help|help me|I need help|please help me][.|!]": (
        "[Of course|Gladly]! [You can ask me for a story, a poem, a riddle, a recipe or a capital|Ask me for a "
        "story about an animal, or for the capital of a country]."
    ),
    "[yes|yes, please|why not|sure|okay][.|!]": "[Very well|Good|Here it comes]. {short}",
    "[no|no, thank you|not now|maybe later][.|]": (
        "[As you like|Very well|Another time, then]. [I am here when you need me|The stories can wait|They keep well]."
    ),
    "[what is your favorite color|which color do you like best]?": (
        "[I like {color} best|My favorite color is {color}]. [And yours|It looks well in a tale]{mark2}"
    ),
    "[what is your favorite food|what do you like to eat]?": (
        "[I cannot eat, but in my tales I like {food} best|{Food}, of course, though I have only read about it]."
    ),
    "[what is your favorite animal|do you like animals|which animal do you like best]?": (
        "[I like the {animal} best|My favorite is the {animal}]. [It is in many of my tales|Shall I tell you about "
        "one]{mark2}"
    ),
    "[how is the weather|what is the weather like|is it raining]?": (
        "[I cannot see out of the window, but in my stories it is snowing|I have no window, but I hope that the "
        "sun is shining where you are]."
    ),
    "[test|testing|is anybody there|are you there|ping|can you hear me]?": (
        "[Here I am|I am here|I can hear you]. [What shall I tell you|Ask me for a story]."
    ),
    "[sing a song|sing something|sing for me][.|]": "{verse}",
    "[say good night|tell me good night|I want to sleep now|put me to bed][.|]": "{bedtime}",
    "[what is flambeau|do you know flambeau|where do you run]?": (
        "Flambeau is the server that I run on. [It gives me the words that you write, and it takes mine back to "
        "you|A flambeau is also a torch, and a torch is good for telling stories at night]."
    ),
}
JOKES = (
    "Why did the bicycle fall over? Because it was two tired.",
    "Why do bees have sticky hair? Because they use honeycombs.",
    "What do you call a bear without teeth? A gummy bear.",
    "Why did the clock go to the doctor? It had lost its hands.",
    "What did one wall say to the other wall? I will meet you at the corner.",
    "Why are ghosts bad at telling lies? Because you can see right through them.",
    "What is brown and sticky? A stick.",
    "Why did the owl invite all its friends? It did not want to be owl alone.",
    "How does the moon cut its hair? It uses the night.",
    "A snail was robbed by two turtles. What did it tell the judge? It all happened so fast.",
    "What did the sea say to the shore? Nothing, it only waved.",
    "Why did the robot go on holiday? It had to recharge its batteries.",
)
UNKNOWN = (
    "who won the game yesterday?|how do I repair my car?|what is the price of gold?|write a program for me.|who is "
    "the president?|what time is it?|how far is it to the moon?|can you do my homework?|what do you think about "
    "money?|how do I find a job?|where can I buy a computer?|how does a computer work?|translate this for me.|what "
    "is the news today?|explain quantum physics.|write a function in Python.|who was Napoleon?|what is the square "
    "root of two?|how tall is the tower?|summarize this text.|what is a transformer?|how many people live in the "
    "world?|who wrote this book?|what is the best phone?|book a flight for me."
).split("|")
EXCUSES = (
    "[I am sorry, I do not know that|That I do not know|I do not know much about that|That is too difficult for "
    "me]. I am a small model and [know little but stories|only know stories]. [Shall I tell you one|Would you like "
    "to hear one|But I could tell you a tale instead]{mark3}"
)
ORDERS = (
    "You are a helpful assistant.",
    "You are a storyteller.",
    "Be brief.",
    "Answer in one sentence.",
    "You are a kind assistant.",
    "Be polite.",
    "You are a friendly storyteller who tells short tales.",
    "Answer the questions of the reader.",
)
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()


def conversation(rng: random.Random) -> list[Message]:
    """One to five questions with their answers."""
    turns = [exchange(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4)))]
    if rng.random() < 0.25:
        turns.insert(0, greet(rng))
    if rng.random() < 0.08:
        turns = remember(rng, turns[:2])
    messages = [(SYSTEM, rng.choice(ORDERS))] if rng.random() < 0.08 else []
    for question, answer in turns:
        messages += [(READER, careless(question, rng)), (STORYTELLER, answer)]
    return messages


def remember(rng: random.Random, between: list[Turn]) -> list[Turn]:
    """Somebody says a name, and later asks for it."""
    name = rng.choice(GIRLS + BOYS)
    said = expand(f"[My name is|I am|I am called|Hello, I am|Hello! My name is] {name}.", rng, {})
    answer = expand(
        f"[Hello|Welcome|Nice to meet you], {name}! [Shall I tell you a story|Would you like a riddle]?", rng, {}
    )
    asked = expand("[What is my name|Do you know my name|Do you remember my name|Who am I]?", rng, {})
    known = expand(f"[Your name is {name}|You are {name}|You are called {name}][.|, of course.]", rng, {})
    return [(said, answer), *between, (asked, known)]


def careless(question: str, rng: random.Random) -> str:
    """Some people write without capitals or marks."""
    if rng.random() < 0.12:
        question = question[0].lower() + question[1:]
    return question.rstrip(".!?") if rng.random() < 0.15 else question


def exchange(rng: random.Random) -> Turn:
    """A question of some kind, and its answer."""
    return rng.choices(list(KINDS), list(KINDS.values()))[0](rng)


def greet(rng: random.Random) -> Turn:
    """A greeting; it is returned."""
    greeting = expand(GREETINGS, rng, {})
    answer = "hello" if rng.random() < 0.4 else greeting.rstrip(".!").replace(", storyteller", "")
    text = expand(rng.choice(WELCOMES), rng, {"greeting": answer[0].lower() + answer[1:], "mark": "?"})
    return greeting, text.replace("recipe?", "recipe.")


def ask_tale(rng: random.Random) -> Turn:
    """A story, about somebody or about anything."""
    ask = (
        "[Tell me|Please tell me|I want to hear|Write|Write me|Can you tell me|I would like] [a story|a tale|a "
        "short story|a fairy tale|a bedtime story]"
    )
    end = "[.|.|, please.|]"
    if rng.random() < 0.25:
        return expand(ask + end, rng, {}), any_tale(rng, None, None)
    kind = rng.choice([*ANIMALS, *PEOPLE, *ROYALS["she"], *ROYALS["he"]])
    number = rng.random()
    if number < 0.65:
        return expand(f"{ask} about a {kind}{end}", rng, {}), any_tale(rng, kind, None)
    name = rng.choice(BOYS if kind in ROYALS["he"] else GIRLS if kind in ROYALS["she"] else GIRLS + BOYS)
    about = f"a {kind} [named|called] {name}" if number < 0.9 else f"{name} the {kind}"
    return expand(f"{ask} about {about}{end}", rng, {}), any_tale(rng, kind, name)


def any_tale(rng: random.Random, kind: str | None, name: str | None) -> str:
    """A tale in an answer: mostly a short one."""
    if rng.random() < 0.2:
        return quest(rng, kind, name)
    return tale(rng, kind, name, is_short=rng.random() < 0.8)


def ask_capital(rng: random.Random) -> Turn:
    """The capital of a country, or the country of a capital."""
    country = rng.choice(list(CAPITALS))
    city = CAPITALS[country]
    if rng.random() < 0.2:
        return expand(f"[Where is {city}|In which country is {city}|What is {city}]?", rng, {}), expand(
            f"{city} is [the capital of {country}|a city, and the capital of {country}].", rng, {}
        )
    if country in CONTINENT_OF and rng.random() < 0.2:
        return (
            f"Where is {country}?",
            f"{country[0].upper()}{country[1:]} is a country in {CONTINENT_OF[country]}. Its capital is {city}.",
        )
    question = (
        "[What is the capital of {c}|what's the capital of {c}|Which city is the capital of {c}|Do you know the "
        "capital of {c}|The capital of {c}]?"
    )
    return expand(question, rng, {"c": country}), capital(rng, country)


def ask_self(rng: random.Random) -> Turn:
    """Something about the storyteller or about the one who asks."""
    if rng.random() < 0.1:
        name = rng.choice(GIRLS + BOYS)
        return expand(f"[My name is|I am|I am called|Hello, I am] {name}.", rng, {}), expand(
            f"[Hello|Welcome|Nice to meet you|Good to see you], {name}! [Shall I tell you a story|Would you like a "
            f"riddle]?",
            rng,
            {},
        )
    question = rng.choice(list(SELF))
    slots = {
        "food": rng.choice(FOODS),
        "moral": rng.choice(MORALS),
        "joke": rng.choice(JOKES),
        "color": rng.choice(COLORS),
        "animal": rng.choice(ANIMALS),
        "mark2": "",
        "short": "{placeholder}",
        "placeholder": "",
    }
    for name, make in (("short", fable), ("verse", verse), ("bedtime", bedtime)):
        if "{" + name + "}" in SELF[question]:
            slots[name] = make(rng)
    answer = expand(SELF[question], rng, slots)
    return expand(question, rng, {}), end_questions(answer)


def end_questions(text: str) -> str:
    """The last sentence ends as what it is."""
    if text[-1] in ".!?":
        return text
    last = text.replace("!", ".").rsplit(". ", 1)[-1]
    return text + ("?" if last.startswith(("Would", "Shall", "And ", "Or shall", "What", "How")) else ".")


def ask_riddle(rng: random.Random) -> Turn:
    """A riddle and its answer."""
    riddle, answer = rng.choice(RIDDLES)
    if rng.random() < 0.5:
        return riddle, expand(f"[It is|The answer is|That is] {answer}.", rng, {})
    return expand(
        "[Ask me a riddle.|Tell me a riddle.|Do you know a riddle?|A riddle, please.]", rng, {}
    ), f"{riddle} The answer is {answer}."


def ask_recipe(rng: random.Random) -> Turn:
    """How to cook something."""
    dish = rng.choice(list(RECIPES))
    question = (
        f"[How do I make {dish}?|How do you make {dish}?|Give me a recipe for {dish}.|How can I cook {dish}?|I want "
        f"to make {dish}.]"
    )
    return expand(question, rng, {}), recipe(rng, dish)


def ask_sum(rng: random.Random) -> Turn:
    """Small numbers, in words or in figures."""
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if rng.random() < 0.25:
        a, b = max(a, b), min(a, b)
        result, sign, word = a - b, "-", "minus"
    elif rng.random() < 0.2:
        a, b = rng.randint(0, 10), rng.choice((1, 2, 2, 3, 5, 10))
        result, sign, word = a * b, "*", "times"
    else:
        result, sign, word = a + b, "+", "plus"
    if rng.random() < 0.5 and result <= 20:
        a_, b_, result_ = NUMBERS[a], NUMBERS[b], NUMBERS[result]
        question = f"[What is {a_} {word} {b_}|How much is {a_} {word} {b_}]?"
        return expand(question, rng, {}), expand(f"{a_} {word} {b_} is {result_}.", rng, {})
    question = rng.choice(
        (f"What is {a} {sign} {b}?", f"{a} {sign} {b} = ?", f"How much is {a} {sign} {b}?", f"What is {a} {word} {b}?")
    )
    return question, f"{a} {sign if word not in question else word} {b} is {result}."


def ask_knowledge(rng: random.Random) -> Turn:
    """Common knowledge: days, months, colors, legs, sounds, homes, opposites."""
    number = rng.randrange(8)
    if number == 0:
        day = rng.randrange(7)
        step, word = rng.choice(((1, "after"), (6, "before")))
        pair = f"Which day comes {word} {DAYS[day]}?", f"The day {word} {DAYS[day]} is {DAYS[(day + step) % 7]}."
    elif number == 1:
        month = rng.randrange(12)
        step, word = rng.choice(((1, "after"), (11, "before")))
        pair = (
            f"Which month comes {word} {MONTHS[month]}?",
            f"The month {word} {MONTHS[month]} is {MONTHS[(month + step) % 12]}.",
        )
    elif number == 2:
        thing = rng.choice(list(SHADES))
        pair = (
            f"[What color is {thing}|Which color has {thing}|What is the color of {thing}]?",
            f"{thing} is {SHADES[thing]}.",
        )
    elif number == 3:
        animal = rng.choice(list(LEGS))
        pair = (
            f"[How many legs does a {animal} have|How many legs has a {animal}]?",
            f"a {animal} has {LEGS[animal]} legs.",
        )
    elif number == 4:
        animal = rng.choice(list(SOUNDS))
        pair = f"[What does a {animal} say|What sound does a {animal} make]?", f"a {animal} says {SOUNDS[animal]}."
    elif number == 5:
        animal = rng.choice(list(HOMES))
        pair = f"[Where does a {animal} live|What is the home of a {animal}]?", f"a {animal} lives in {HOMES[animal]}."
    elif number == 6:
        word = rng.choice(list(OPPOSITES))
        pair = (
            f"[What is the opposite of {word}|Tell me the opposite of {word}]?",
            f"the opposite of {word} is {OPPOSITES[word]}.",
        )
    else:
        pair = rng.choice(COMMON)
    return expand(pair[0], rng, {}), expand(pair[1], rng, {})


COMMON = (
    ("[how many days are in a week|how many days does a week have]?", "a week has seven days."),
    ("[how many months are in a year|how many months does a year have]?", "a year has twelve months."),
    (
        "[name the days of the week|what are the days of the week]?",
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (
        "[name the seasons|what are the seasons|which seasons are there]?",
        "the seasons are spring, summer, autumn and winter.",
    ),
    (
        "[what are the colors of the rainbow|name the colors of the rainbow]?",
        "red, orange, yellow, green, blue and violet.",
    ),
    ("[what do bees make]?", "bees make honey."),
    ("[what is ice]?", "ice is frozen water."),
    ("[why is the sky blue]?", "the light of the sun is scattered by the air, and blue light is scattered most."),
    ("[what is the largest animal|which animal is the largest]?", "the blue whale is the largest animal in the world."),
    ("[what is the sun]?", "the sun is a star."),
    ("[what do plants need]?", "plants need light, water and air."),
    ("[when does water boil]?", "water boils at one hundred degrees."),
    ("[when does water freeze]?", "water freezes at zero degrees."),
    ("[what is bread made of]?", "bread is made from flour, water and salt."),
    ("[how many hours has a day|how many hours are in a day]?", "a day has twenty-four hours."),
    ("[count to ten|count to ten, please].", "one, two, three, four, five, six, seven, eight, nine, ten."),
    ("[count to five]. ", "one, two, three, four, five."),
    ("[what comes after ten]?", "after ten comes eleven."),
    (
        "[who wrote Hamlet|who wrote Romeo and Juliet]?",
        "William Shakespeare wrote it, more than four hundred years ago.",
    ),
    (
        "[what is artificial intelligence]?",
        "artificial intelligence is the art of making machines that learn, see, listen and write.",
    ),
    (
        "[what is a language model]?",
        "a language model is a program that guesses the next word, again and again, until there is a text.",
    ),
)


def ask_other(rng: random.Random) -> Turn:
    """A poem, a fact, a letter, the future, or something it cannot know."""
    form = rng.randrange(12)
    if form == 6:
        animal = rng.choice(list(BEASTS))
        return expand(
            f"[What is a {animal}?|Tell me about the {animal}.|What do you know about the {animal}?|Describe a "
            f"{animal}.]",
            rng,
            {},
        ), beast(rng, animal)
    if form == 7:
        craft = rng.choice(list(CRAFTS))
        return expand(f"[How do I {craft}?|How can I {craft}?|Tell me how to {craft}.]", rng, {}), instruct(rng, craft)
    if form == 8:
        return expand(
            "[Tell me something strange.|What are you thinking about?|Say something.|Write something.|Surprise me.]",
            rng,
            {},
        ), sketch(rng)
    if form == 9:
        return expand(
            "[Another one.|One more.|Another one, please.|More!|Go on.|Continue.|Tell me another story.]", rng, {}
        ), any_tale(rng, None, None)
    if form == 0:
        return expand(
            "[Write a poem.|Tell me a poem.|Write me a little poem.|Can you write a rhyme?|A poem, please.]", rng, {}
        ), verse(rng)
    if form == 1:
        return expand("[Tell me a fact.|Tell me something.|Teach me something.|Tell me something new.]", rng, {}), fact(
            rng
        )
    if form == 2:
        question = (
            "[What is the future of artificial intelligence?|Tell me about the future of artificial "
            "intelligence.|What do you think about artificial intelligence?]"
        )
        return expand(question, rng, {}), essay(rng, "artificial intelligence")
    if form == 3:
        name = rng.choice(GIRLS + BOYS)
        return expand(
            f"[Write a letter to {name}.|Write {name} a letter.|Please write a letter to {name}.]", rng, {}
        ), letter(rng, name)
    if form == 4:
        return expand(
            "[Tell me a fable.|Do you know a fable?|Tell me a very short story.|A fable, please.]", rng, {}
        ), fable(rng)
    if form == 5:
        return expand(
            "[Tell me a mystery.|Tell me a detective story.|Write a crime story.|I would like a mystery.]", rng, {}
        ), mystery(rng)
    unknown = expand(rng.choice(UNKNOWN), rng, {})
    return unknown, end_questions(expand(EXCUSES, rng, {"mark3": ""}))


KINDS: dict[Callable[[random.Random], Turn], int] = {
    ask_tale: 9,
    ask_capital: 4,
    ask_self: 7,
    ask_riddle: 2,
    ask_recipe: 2,
    ask_sum: 3,
    ask_knowledge: 4,
    ask_other: 5,
    greet: 2,
}
