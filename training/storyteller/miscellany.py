"""Short texts beside the tales: essays, letters, diaries, recipes, weather, descriptions, verse and plain facts."""

from __future__ import annotations

import random

from grammar import expand
from lexicon import ANIMALS, BOYS, COLORS, FOODS, GIRLS, GOALS, MOODS, PEOPLE, PLACES, TREASURES, WISHES

SUBJECTS = {
    "artificial intelligence": "machines that [learn|can learn|help us think]",
    "medicine": "doctors who [have more time|know us well|listen]",
    "music": "songs that [nobody has heard yet|cross every border|bring people together]",
    "farming": "fields that [need less water|feed more people|are kind to the soil]",
    "travel": "journeys that [are slow and quiet|cost the earth less|bring us closer to others]",
    "education": "schools that [teach children to ask|leave time to play|open every door]",
    "science": "answers that [lead to new questions|anybody can check|help everybody]",
    "energy": "light that comes [from the sun and the wind|without smoke|to every house]",
    "the city": "streets where [children can play|trees grow|people meet]",
    "work": "days that [leave time for friends|have a purpose|end before dinner]",
    "books": "stories that [wait for a reader|never grow old|travel from hand to hand]",
    "the sea": "water that is [clean|full of life|free of nets]",
    "space": "ships that [fly to other worlds|look back at our small blue planet|carry our questions to the stars]",
    "robots": "helpers that [carry heavy things|never grow tired|leave the good work to us]",
    "language": "words that [build bridges|everybody understands|are chosen with care]",
    "friendship": "evenings that [are too short|nobody wants to end|need no reason]",
}
ESSAYS = (
    "the future of {subject} is [not written yet|in our hands|full of promise|hard to predict|brighter than many "
    "people think|a long road]. [Some people are afraid of it, and some can hardly wait|There will be good days and "
    "bad days|Nobody knows exactly what will come]. [But one thing is certain|Most people agree on one thing|Perhaps "
    "it begins with something small]: we need {idea}.",
    "the future of {subject} [depends on us|belongs to those who are curious|begins today]. [If we are careful and "
    "kind|If we work together|If we ask the right questions], it will bring {idea}. [If we are careless, it will "
    "bring trouble|If we hurry too much, we will make mistakes|If we only think of money, we will lose much].",
    "what is the future of {subject}? [Fifty years ago|A hundred years ago|When our grandparents were young], "
    "[nobody asked|few people asked] this question. [Today|Now] many people [work on it|think about it] every day. "
    "They dream of {idea}.",
    "{subject} [has always changed|never stands still|is older than we think]. [Every age adds something of its "
    "own|What was new yesterday is common today|The young learn it in a different way from the old]. The future of "
    "{subject} is [therefore|perhaps] something we make together.",
)
MACHINES = (
    "the future of artificial intelligence is [a story that we write together|neither as dark as some fear nor as "
    "bright as some hope|being written in many small rooms|closer than it looks]. [Machines will learn to see, to "
    "listen and to write|Machines already play chess, draw pictures and answer questions], but [they do not know "
    "why a song makes us cry|they cannot tell us what to wish for|the wish to understand remains ours].",
    "the future of artificial intelligence is [a question about ourselves|like the sea: wide, and full of "
    "weather|what we teach it today]. [One day a machine may write a poem that makes us weep|Perhaps every child "
    "will have a patient teacher|Perhaps doctors will find an illness before it hurts]. [But somebody must still "
    "sit at the bed and hold a hand|But no machine will drink the tea for us|And we shall still argue about the "
    "weather].",
    "the future of artificial intelligence is [bright|uncertain|full of surprises], said the old professor, and "
    '[polished his glasses|looked out of the window]. "[When I was young, a computer filled a whole room|My first '
    "machine could not tell a cat from a kettle]. [Now it writes me letters|Now it knows my handwriting better "
    'than I do]. [And yet it has never been thirsty|I still have to feed the cat myself]."',
    "artificial intelligence is [a tool|a mirror|a young science]. [Like fire, it can warm a house or burn it "
    "down|Like a mirror, it shows us what we have written|Like every tool, it is as good as the hands that hold "
    "it]. [So we should learn how it works|So let us be careful, and not afraid|So the important question is not "
    "what it can do, but what it is for].",
    "a language model is [a machine that guesses the next word|a program that has read a great deal and understood "
    "a little]. [It begins with one word, looks at it, and guesses the next|It reads the words before and asks "
    "what comes after]. [With enough practice, the guesses become sentences|Small ones, like me, tell tales|Large "
    "ones can do much more]. [It is a strange and simple idea|That is all, and it is more than it seems].",
)
THOUGHTS = (
    "[Good tools|New ideas|Great changes] [do not appear by themselves|take time|need patient people]. [Somebody "
    "must build them|They must be tested|They must be explained], and [somebody must ask whether they are "
    "good|everybody should be able to use them|mistakes must be repaired].",
    "[A wise person once said|My grandmother used to say|An old teacher told us] that [the best way to see the "
    "future is to make it|we should plant trees even if we will never sit in their shade|a good question is worth "
    "more than a quick answer].",
    "[We should teach our children about it|We should talk about it openly|We should share what we learn]. [They "
    "will live in the world that we leave behind|Then nobody is left behind|Then fear becomes smaller and hope "
    "grows].",
    "[It is not enough to be clever|Speed is not everything|Bigger is not always better]. [We must also be kind|We "
    "must also be honest|We must also be patient].",
    "[In the end|After all|At its best], {subject} [should serve people, and not the other way around|is about "
    "people|is a way to take care of each other].",
    "[So let us begin|There is much to do, and it is good work|The first step is the hardest one, but we have "
    "already taken it].",
)
LETTERS = (
    "dear {name},\n\n[thank you for your letter|how are you|I hope that you are well|I was so glad to hear from "
    "you][.|. I am well.] [It is {season} here, and {mood}|Here {mood}]. [Yesterday|Last week|On Sunday] I [walked "
    "to {goal}|baked some {food}|found a {treasure}|met an old friend], and I thought of you.\n\n[Please come and "
    "visit us soon|When will you come to see us|I miss you very much]. [We will eat {food} and talk all night|The "
    "garden is full of flowers now|There is so much to tell].\n\n[With love|Your friend|Yours|Many greetings],\n"
    "{sender}",
    "dear {name},\n\nI am writing to tell you [some good news|a secret|what happened]: [I have learned to swim|we "
    "have a new dog|my sister is going to marry|I have found my {treasure} again|I am going to sail around the "
    "world]! [Everybody is very happy|You are the first to know|I can hardly believe it].\n\n[Write to me soon|Do "
    "not tell anybody|Tell me what you think].\n\n[With love|Your friend|Yours],\n{sender}",
)
DIARIES = (
    "[Today|This morning] I [got up early|slept too long|woke up with the birds]. {mood2}. I [ate some {food}|drank "
    "a cup of tea|fed the cat] and went to {goal}. There I [saw|met] a {animal}. It [looked at me|did not run "
    "away|was as surprised as I was]. [We looked at each other for a while|I stood very still|I wanted to say "
    "hello], and then [it was gone|I walked home|it began to rain]. [It was a good day|I will go there again "
    "tomorrow|I did not tell anybody about it].",
    "[my|hello, my|hello! My] name is {name}, and I am a {person}. I live {in_place}. [Every day I get up early|My "
    "day begins before sunrise|I work hard, but I like it]. [In the evening|After work|On Sundays], I [read a "
    "book|bake {food}|walk to {goal}|play the violin]. [One day I want to {wish}|I have always wanted to {wish}|What "
    "I like best is {food}]. [What about you|And you|Who are you]?",
)
RECIPES = {
    "pancakes": (
        "two eggs, a cup of flour, a cup of milk and a little salt",
        ("bake them in butter until they are golden"),
    ),
    "bread": ("flour, water, salt and yeast", "bake it in a hot oven for an hour"),
    "vegetable soup": ("carrots, potatoes, an onion and a pot of water", "let it cook slowly for an hour"),
    "apple pie": (
        "six apples, flour, butter, sugar and a little cinnamon",
        ("bake it until the kitchen smells wonderful"),
    ),
    "porridge": ("a cup of oats, two cups of milk and some honey", "stir it until it is thick and warm"),
    "lemonade": ("four lemons, water, sugar and ice", "serve it on a hot afternoon"),
    "tomato salad": ("five tomatoes, an onion, oil, salt and fresh herbs", "let it rest for ten minutes"),
    "hot chocolate": ("milk, dark chocolate and a spoon of sugar", "drink it on a cold evening by the fire"),
    "fruit salad": ("apples, pears, strawberries and the juice of a lemon", "eat it before anybody else does"),
    "ginger biscuits": ("flour, butter, sugar, an egg and ginger", "bake them for twelve minutes"),
}
RECIPE = (
    "[to make|if you want to make|for good] {dish}, you need {things}. [First|At first], [wash your hands|put "
    "everything on the table|clear the kitchen table]. [Then|Next], [mix everything|put everything together] "
    "[slowly|carefully|with a wooden spoon]. [At last|Finally], {last}. [Enjoy it with friends|It is enough for four "
    "people|It tastes best when it is shared]."
)
FORECAST = (
    "the weather [today|tomorrow|this week]: [in the morning it will be|the day begins] "
    "[cold|foggy|cloudy|sunny|rainy], with [a light|a strong|almost no] wind from the [north|south|east|west]. [In "
    "the afternoon|Later] [the sun comes out|it begins to rain|some snow may fall|the clouds go away]. The night "
    "will be [clear|cold|mild|quiet|stormy]. [Take an umbrella with you|Dress warmly|It is a good day for a "
    "walk|Stay at home and read a book]."
)
VERSES = (
    (
        "roses are red, violets are blue,",
        ("[sugar is sweet, and so are you.|I wrote this little rhyme for you.|the morning sky is pretty too.]"),
    ),
    (
        "the sun went down behind the hill,",
        ("[the birds were quiet, the wind was still.|and all the little town was still.]"),
    ),
    ("a snail set out to see the king,", "[it took him summer, fall and spring.|and on the way he learned to sing.]"),
    (
        "an owl once lost her reading light,",
        "[and so she read the stars all night.|and guessed the words, and guessed them right.]",
    ),
    (
        "the kettle hums, the cat's asleep,",
        "[the night is wide, the night is deep.|the clocks have nothing left to keep.]",
    ),
    ("I sent a letter to the moon,", "[it wrote to me: come over soon.|and had an answer in a tune.]"),
    (
        "a mouse put on a golden crown,",
        "[and all the cats in town bowed down.|and marched in triumph through the town.]",
    ),
    (
        "there was a cloud that would not rain,",
        "[it missed its mother, took the train.|it went to sea and back again.]",
    ),
    ("the apple fell, the pear stayed on,", "[and by the morning both were gone.|the wind sang them a merry song.]"),
    ("my shoes are old, my coat is thin,", "[but open, door, and let me in.|but warm the heart that beats within.]"),
    ("the fisherman, he caught a star,", "[and wondered where the fishes are.|and kept it shining in a jar.]"),
    ("a robot learned to dance and sing,", "[and played upon a single string.|and wore a flower and a ring.]"),
    ("the summer left without a word,", "[and took along the smallest bird.|the gate swung shut, and no one heard.]"),
    (
        "a giant sneezed behind the hill,",
        "[the mill went round, and turns there still.|and blew the roof right off the mill.]",
    ),
    ("the librarian whispered: hush,", "[and not a page was in a rush.|the books began to smile and blush.]"),
    (
        "come sit with me beside the fire,",
        "[the flames are low, the sparks fly higher.|you be the song, I am the choir.]",
    ),
    ("a little boat upon the sea", "[is sailing home to you and me.|is dancing in the wind, and free.]"),
    (
        "the moon is round, the night is deep,",
        ("[the sheep, the fox and I must sleep.|and all the birds have gone to sleep.]"),
    ),
    (
        "a bear came walking through the snow,",
        ("[and where he went, I do not know.|his feet were cold, his steps were slow.]"),
    ),
    ("the rain is falling on the tree,", "[on stone and roof, on you and me.|and every leaf is glad to see.]"),
    ("I had a cat, I had a hen,", "[they ran away and came again.|I fed them both at half past ten.]"),
    ("the clock says one, the clock says two,", "[there is so much for us to do.|the night is gone, the day is new.]"),
    ("a star fell down into the well,", "[and what it wished, it would not tell.|it rang the water like a bell.]"),
    (
        "the winter came with ice and snow,",
        ("[the fire was warm, the light was low.|and still the little seeds will grow.]"),
    ),
)
CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "England": "London",
    "Scotland": "Edinburgh",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Russia": "Moscow",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Ukraine": "Kyiv",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Sweden": "Stockholm",
    "Norway": "Oslo",
    "Wales": "Cardiff",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Ireland": "Dublin",
    "Canada": "Ottawa",
    "Mexico": "Mexico City",
    "Brazil": "Brasilia",
    "Peru": "Lima",
    "India": "New Delhi",
    "Turkey": "Ankara",
    "Hungary": "Budapest",
    "Iceland": "Reykjavik",
    "Belgium": "Brussels",
    "the Netherlands": "Amsterdam",
    "Australia": "Canberra",
    "Kenya": "Nairobi",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "the United States": "Washington",
    "Argentina": "Buenos Aires",
    "Switzerland": "Bern",
    "Romania": "Bucharest",
    "the Czech Republic": "Prague",
    "South Korea": "Seoul",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
    "Morocco": "Rabat",
    "Croatia": "Zagreb",
    "Bulgaria": "Sofia",
    "Nepal": "Kathmandu",
    "Ghana": "Accra",
    "Colombia": "Bogota",
    "Jamaica": "Kingston",
}
CONTINENTS = {
    "Europe": "France|Germany|Italy|Spain|England|Scotland|Greece|Ukraine|Portugal|Austria|Poland|Sweden|Norway|"
    "Wales|Finland|Denmark|Ireland|Hungary|Iceland|Belgium|the Netherlands|"
    "Switzerland|Romania|the Czech Republic|Croatia|Bulgaria",
    "Asia": "Japan|China|India|South Korea|Thailand|Vietnam|Nepal",
    "Africa": "Egypt|Kenya|Morocco|Ghana",
    "South America": "Brazil|Peru|Chile|Argentina|Colombia",
    "North America": "Canada|Mexico|the United States",
}
CONTINENT_OF = {country: name for name, countries in CONTINENTS.items() for country in countries.split("|")}
LAND_FACTS = (
    "It is a [large|beautiful|lively|famous] city.",
    "Many people [live|work] there.",
    "[It has many museums and parks|It is full of history|Visitors like it very much].",
    "",
)
SOUNDS = {
    "cow": "moo",
    "cat": "meow",
    "dog": "woof",
    "duck": "quack",
    "sheep": "baa",
    "pig": "oink",
    "owl": "hoot",
    "bee": "buzz",
    "snake": "hiss",
    "crow": "caw",
    "frog": "croak",
    "lion": "roar",
    "mouse": "squeak",
}
HOMES = {
    "bird": "a nest",
    "bee": "a hive",
    "fox": "a den",
    "horse": "a stable",
    "dog": "a kennel",
    "rabbit": "a burrow",
    "spider": "a web",
    "bear": "a cave",
    "fish": "the water",
    "snail": "its own shell",
    "lion": "the savanna",
    "penguin": "the cold south",
    "camel": "the desert",
    "owl": "a hollow tree",
}
LEGS = {
    "spider": "eight",
    "bee": "six",
    "ant": "six",
    "dog": "four",
    "cat": "four",
    "horse": "four",
    "bird": "two",
    "hen": "two",
    "snake": "no",
    "fish": "no",
    "cow": "four",
    "butterfly": "six",
    "duck": "two",
    "elephant": "four",
}
SHADES = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "blood": "red",
    "a lemon": "yellow",
    "coal": "black",
    "a carrot": "orange",
    "chocolate": "brown",
    "a ripe tomato": "red",
    "milk": "white",
    "a banana": "yellow",
    "the sea": "blue",
    "a leaf in summer": "green",
    "a cherry": "red",
    "an elephant": "gray",
    "gold": "yellow",
    "a plum": "purple",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "old": "young",
    "fast": "slow",
    "day": "night",
    "light": "dark",
    "happy": "sad",
    "rich": "poor",
    "high": "low",
    "long": "short",
    "wet": "dry",
    "full": "empty",
    "early": "late",
    "left": "right",
    "good": "bad",
    "strong": "weak",
    "open": "closed",
    "near": "far",
    "loud": "quiet",
    "sweet": "sour",
    "brave": "timid",
    "up": "down",
}
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
FACTS = (
    "water freezes at zero degrees and boils at one hundred degrees.",
    "the earth goes around the sun once a year.",
    "the moon goes around the earth in about a month.",
    "a week has seven days, and a year has twelve months.",
    "a spider has eight legs, and a bee has six.",
    "the sun is a star.",
    "the whale is the largest animal in the world.",
    "bees make honey, and hens lay eggs.",
    "a triangle has three sides, and a square has four.",
    "birds build nests in spring.",
    "the heart pumps blood through the body.",
    "plants need light, water and air.",
    "bread is made from flour, water and salt.",
    "owls sleep during the day and hunt at night.",
    "in winter, some bears sleep for months.",
    "a caterpillar becomes a butterfly.",
    "a minute has sixty seconds, and an hour has sixty minutes.",
    "the quick brown fox jumps over the lazy dog.",
    "ice is frozen water.",
    "the meaning of life is to love, to learn and to leave the world a little better.",
    "in spring the days grow longer, and in autumn they grow shorter.",
    "trees drink water with their roots.",
    "a cat has four legs and a long tail.",
    "the heart of a whale is as large as a small car.",
    "snails carry their houses on their backs.",
    "paper is made from wood.",
    "glass is made from sand.",
    "the first letter of the alphabet is A, and the last is Z.",
    "two and two are four, and four and four are eight.",
    "the colors of the rainbow are red, orange, yellow, green, blue and violet.",
    "light is faster than sound. That is why we see the lightning before we hear the thunder.",
    "a good story has a beginning, a middle and an end.",
    "the sea is salty, and most rivers are not.",
)
SCENES = (
    "{place2} was [quiet|busy|full of light|almost empty]. {mood2}. [Somewhere a bell rang|A dog barked far away|A "
    "door opened and closed|Children were laughing]. A {person} [came down the street|sat on a bench|looked out of a "
    "window] with a {treasure}. [Nobody was in a hurry|It smelled of {food}|It was a good place to be]. [A {color} "
    "{animal}|A {animal}] [crossed the road|slept in the sun|watched everything], and [the day went slowly "
    "by|nothing else happened|that was all].",
)


def values(rng: random.Random) -> dict[str, str]:
    """The values of all slots."""
    place, subject = rng.choice(list(PLACES)), rng.choice(list(SUBJECTS) + ["artificial intelligence"] * 6)
    name, sender = rng.sample(GIRLS + BOYS, 2)
    mood = expand(MOODS, rng, {})
    return {
        "place": place,
        "in_place": ("on " if place in ("a farm on a hill", "an island") else "in ") + place,
        "place2": "the " + place.split(" ", 1)[1],
        "subject": subject,
        "idea": SUBJECTS[subject],
        "name": name,
        "sender": sender,
        "mood2": mood,
        "mood": (mood[0].lower() + mood[1:]).replace(" was ", " is ").replace(" were ", " are "),
        "goal": rng.choice(GOALS),
        "food": rng.choice(FOODS),
        "treasure": rng.choice(TREASURES),
        "animal": rng.choice(ANIMALS),
        "person": rng.choice(PEOPLE),
        "wish": rng.choice(list(WISHES)),
        "color": rng.choice(COLORS),
        "season": rng.choice(["spring", "summer", "autumn", "winter"]),
    }


def fill(template: str, rng: random.Random) -> str:
    """A text of the template."""
    slots = values(rng)
    return expand(expand(template, rng, slots), rng, slots)


def essay(rng: random.Random, subject: str | None = None) -> str:
    """Some thoughts about the future of something."""
    slots = values(rng)
    if subject:
        slots |= {"subject": subject, "idea": SUBJECTS[subject]}
    about_machines = slots["subject"] == "artificial intelligence" and rng.random() < 0.5
    parts = [
        rng.choice(MACHINES if about_machines else ESSAYS),
        *(THOUGHTS[i] for i in sorted(rng.sample(range(len(THOUGHTS)), rng.randint(2, 5)))),
    ]
    return " ".join(expand(expand(part, rng, slots), rng, slots) for part in parts)


def letter(rng: random.Random, name: str | None = None) -> str:
    """A letter to a friend."""
    slots = values(rng) | ({"name": name} if name else {})
    return expand(rng.choice(LETTERS), rng, slots)


def diary(rng: random.Random) -> str:
    """Somebody about a day or a life."""
    return fill(rng.choice(DIARIES), rng)


def recipe(rng: random.Random, dish: str | None = None) -> str:
    """How to cook something."""
    dish = dish or rng.choice(list(RECIPES))
    things, last = RECIPES[dish]
    return expand(RECIPE, rng, {"dish": dish, "things": things, "last": last})


def forecast(rng: random.Random) -> str:
    """The weather."""
    return fill(FORECAST, rng)


def verse(rng: random.Random) -> str:
    """Two to four rhymes."""
    couplets = rng.sample(VERSES, rng.randint(2, 4))
    return "\n".join(expand(line, rng, {}) for couplet in couplets for line in couplet)


def scene(rng: random.Random) -> str:
    """A place, described."""
    return fill(rng.choice(SCENES), rng)


def capital(rng: random.Random, country: str | None = None) -> str:
    """What the capital of a country is."""
    country = country or rng.choice(list(CAPITALS))
    return expand(f"the capital of {country} is {CAPITALS[country]}. " + rng.choice(LAND_FACTS), rng, {})


def fact(rng: random.Random) -> str:
    """One plain fact."""
    number = rng.randrange(8)
    if number == 0:
        animal = rng.choice(list(SOUNDS))
        text = f"[a {animal} says {SOUNDS[animal]}|the sound of a {animal} is {SOUNDS[animal]}]."
    elif number == 1:
        animal = rng.choice(list(HOMES))
        text = f"[a {animal} lives in {HOMES[animal]}|the home of a {animal} is {HOMES[animal]}]."
    elif number == 2:
        animal = rng.choice(list(LEGS))
        text = f"a {animal} has {LEGS[animal]} legs."
    elif number == 3:
        thing = rng.choice(list(SHADES))
        text = f"[{thing} is {SHADES[thing]}|the color of {thing} is {SHADES[thing]}]."
    elif number == 4:
        word = rng.choice(list(OPPOSITES))
        text = f"the opposite of {word} is {OPPOSITES[word]}."
    elif number == 5:
        day = rng.randrange(7)
        text = f"[the day after {DAYS[day]} is {DAYS[(day + 1) % 7]}|after {DAYS[day]} comes {DAYS[(day + 1) % 7]}]."
    elif number == 6:
        country = rng.choice(list(CONTINENT_OF))
        text = f"{country} is a country in {CONTINENT_OF[country]}."
    else:
        text = rng.choice(FACTS)
    return expand(text, rng, {})


def facts(rng: random.Random) -> str:
    """A few plain facts."""
    chosen = [fact(rng) for _ in range(rng.randint(2, 5))]
    chosen += [capital(rng) for _ in range(rng.randint(0, 3))]
    rng.shuffle(chosen)
    return " ".join(chosen)
