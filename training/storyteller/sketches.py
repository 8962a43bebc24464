"""Short pieces of prose: dreams, opinions, instructions, news, thoughts and what animals are like."""

from __future__ import annotations

import random

from grammar import expand, write
from lexicon import BOYS, GIRLS
from tales import cast, join

DREAMS = (
    "[Last night I dreamed|I dreamed|I had a strange dream] that I was [a {kind}|a cloud|very small|the captain of "
    "a ship|in a house without a roof|a letter in a bottle].",
    "[I could hear the grass grow|Everybody spoke in rhymes|The stairs went up and came out at the bottom|The "
    "stars hung so low that I could pick them|It rained buttons|All the doors opened onto the sea].",
    "a {trait} {kind2} [asked me for the time|gave me a {treasure}|sat at the table and ate {food}|wanted to see "
    'my ticket]. "[It is still early|You are late|We have been waiting for you]," said the {kind2}. "[You have '
    'come on the right day|The others are already asleep|Mind the carpet, it is awake]."',
    "[I wanted to answer, but I had forgotten all the words|I looked for my shoes and found only {food}|I tried to "
    "run, but the road was made of pillows|I knew that I had to find {goal}, but not why].",
    "then [a bell rang|somebody called my name|the light changed], and I woke up. [It was raining|The sun was on "
    "my pillow|My feet were cold]. [On the chair lay a {treasure}, and I do not own one|I still do not know what "
    "it means|I closed my eyes, but I could not get back].",
)
FAVORITES = {
    "season": {
        "spring": "everything begins again",
        "summer": "the evenings are long",
        "autumn": "the leaves are gold and the air smells of smoke",
        "winter": "the world is quiet and white",
    },
    "time of day": {
        "the early morning": "nobody else is awake",
        "the evening": "the lamps are lit one by one",
        "noon": "it is time to eat",
        "midnight": "the stars are close",
    },
    "animal": {
        "the owl": "it sees what others miss",
        "the cat": "it does only what it wants",
        "the donkey": "it thinks before it walks",
        "the hedgehog": "it is gentle under all its spines",
        "the whale": "it sings in the dark",
        "the snail": "it is always at home",
    },
    "place": {
        "the library": "a thousand voices are silent there at the same time",
        "the kitchen": "it is warm and smells of {food}",
        "the harbor": "every ship brings a story",
        "the forest": "the trees do not ask questions",
        "the attic": "time has been left there in boxes",
    },
    "color": {
        "blue": "the sea and the sky agree on it",
        "green": "it is the color of patience",
        "red": "it is never shy",
        "yellow": "it warms the eyes",
    },
    "food": {
        "soup": "it can be shared with anybody who comes",
        "bread": "it is honest",
        "plum cake": "my grandmother made it",
        "honey": "it tastes of summer",
    },
    "day of the week": {
        "Sunday": "nobody is in a hurry",
        "Saturday": "it has another free day behind it",
        "Monday": "everything is still possible",
    },
}
OPINIONS = (
    "my favorite {thing} is {choice}, because {reason}. [My sister does not agree|My brother says that I am "
    'wrong|Not everybody understands this]. "[What about {other}|And {other}]?" [she says|he says|they ask]. '
    "[Perhaps we are both right|I smile and say nothing|We argue about it until the tea is cold].",
    "if somebody asks me which {thing} I like best, I say {choice}. [It is hard to explain|There is a simple "
    "reason]: {reason}. [I also like {other}, but that is different|When I was younger, I would have said "
    "{other}]. [One changes|People change, and so do their tastes|But that was before].",
    "I like {choice} [best of all|very much]. [Some people say|They say] that there is no better {thing} than "
    "{other}. [They have never looked closely|They may be right|I do not argue with them]. {Reason}, and that is "
    "enough for me.",
)
CRAFTS = {
    "catch a cloud": (
        "a soft net|a long ladder|much patience",
        "climb the highest hill you know",
        "wait until a small one comes by",
        "talk to it kindly",
    ),
    "wake a sleeping cat": (
        "a tin of fish|a warm lap|good manners",
        "do not touch its tail",
        "open the tin very slowly",
        "say that you are sorry",
    ),
    "write a letter": (
        "a pen|a sheet of paper|somebody to think of",
        "write down the name",
        "write what you would say on a bench by the river",
        "send it before you change your mind",
    ),
    "build a snowman": (
        "fresh snow|two pieces of coal|an old hat",
        "roll a large ball and then a smaller one",
        "give him a nose",
        "tell him a joke, so that he smiles",
    ),
    "tell a good story": (
        "somebody who listens|a little time|a door that opens",
        "begin in the middle",
        "let somebody want something",
        "stop before they are tired",
    ),
    "make friends with a dragon": (
        "pepper|a thick coat|a good joke",
        "knock before you enter the cave",
        "praise its teeth, but not too much",
        "never ask about the gold",
    ),
    "fall asleep": (
        "a pillow|a window|no plans at all",
        "count the things that went well today",
        "forget the number",
        "listen to the house",
    ),
    "plant a tree": (
        "a spade|a bucket of water|a friend",
        "dig a hole that is a little too large",
        "set the tree in it and step back",
        "come back in a hundred years",
    ),
    "find a lost key": (
        "a candle|good eyes|a calm heart",
        "stop looking",
        "make a cup of tea",
        "look in the pocket where you looked first",
    ),
    "become a king": (
        "a crown|a chair|a serious face",
        "sit down",
        "listen to everybody",
        "give the crown to somebody wiser",
    ),
}
INSTRUCTIONS = (
    "how to {craft}: you need {tools}. [First|To begin with], {one}. [Then|After that], {two}. [In the end|At "
    "last|Finally], {three}. [If it does not work, try again tomorrow|It takes some practice|Good luck|Most people "
    "need three attempts].",
    "if you want to {craft}, you need {tools}. {One}. [Take your time|Do not hurry]. {Two}. And [most important of "
    "all|do not forget]: {three}.",
)
NEWS = (
    "[news from {village}|the {village} Times|from our reporter in {village}]: [yesterday|on Tuesday|last night], "
    "a {trait} {kind} [was seen on the roof of the town hall|won the annual race of wheelbarrows|returned a book "
    "that had been borrowed eighty years ago|opened a shop for single socks|was elected mayor by mistake].",
    '"[I only wanted to see the view|I did not know that there was a prize|It seemed the right thing to '
    'do|Somebody had to do it]," the {kind} told us. The {person} [was not pleased|laughed until he had to sit '
    "down|wants to write a song about it].",
    "[the weather: mostly sunny, with some {food} in the evening|lost: one {treasure}; please return it to the "
    "{person2}|for sale: a {treasure}, hardly used|tomorrow: soup for everybody in the square].",
)
VILLAGES = "Little Pudding|Upper Thistle|Nutmeg Bay|Old Button|Crooked Hill|Lower Marsh|Great Whistle|Appleford".split(
    "|"
)
THOUGHTS = (
    "the [meaning of life|secret of happiness|secret of a good life] is [to ask for it less often|not hidden at "
    "all; it is only small|to love, to learn and to leave the kitchen clean|to sit under a tree that you did not "
    "plant, and to plant one under which you will not sit|probably soup]. [My grandfather told me so|A {kind} once "
    "told me that|So I have heard]. [I did not understand it then|I laughed, and now I do not].",
    "time is [a river, and we are the stones|a strange thing: it runs when we are happy|a tailor who alters all "
    "our coats]. [We cannot hold it|Nobody has ever caught it], but [we can wave to it|we can be there when it "
    "comes by|we can look up from our work now and then].",
    "there are two kinds of people: [those who close the door and those who leave it open|those who count the "
    "stars and those who look at them|those who eat the cherry first and those who keep it for the end]. [I belong "
    "to both|It is good that there are both|They usually marry each other].",
    "I think that [trees talk to each other at night|every house has one door that nobody has opened|cats know "
    "more than they say|somewhere there is a drawer with all the lost gloves]. [I cannot prove it|Nobody believes "
    "me], but [I have listened|it would explain a great deal|I sleep better since I know it].",
    "we [went to the sea|walked to {goal}|sat in the garden] and [said little|talked about {kind2}s that never "
    "were|ate {food}]. [The light was yellow|The wind had gone to sleep]. [It was one of those days that one "
    "remembers without knowing why|Nothing happened, and it was wonderful].",
    "yesterday [I lost my umbrella|I met an old teacher|it snowed for the first time this year|I heard a song that "
    "I had forgotten], and [since then I walk more slowly|it was as if somebody had opened a window|I had to sit "
    "down on a bench].",
    "in the beginning there was [only a word, and it was shy|nothing but a great silence|a very small light]. "
    "[Then somebody laughed|Then somebody asked a question|It looked around and was curious], and [that was the "
    "first day|everything else came from that|the rest is history].",
    "she [looked out of the window|put the letter on the table|turned off the lamp] and [listened to the "
    "rain|smiled|counted to ten]. [Nobody was coming, and that was all right|Somewhere a train went by|Tomorrow "
    "she would tell him]. [There was still some {food} left|It was going to be a long winter|The house breathed "
    "slowly].",
    "he [had walked this road a thousand times|was not used to surprises|kept everything, even the string]. But "
    "[today there was a door in the wall|that morning a {kind} sat on his chair|the postman brought him a "
    "{treasure}], and [he did not know who had sent it|nothing was as before|he put on his good hat].",
)
BEASTS = {
    "fox": "a fox is a clever animal with a red coat and a bushy tail. It hunts at night and lives in a den",
    "owl": "an owl is a bird that sees well in the dark. It flies without a "
    "sound and can turn its head almost all the way around",
    "bear": "a bear is large and strong. It likes honey, berries and fish, and it sleeps through the winter",
    "hedgehog": "a hedgehog is a small animal with thousands of spines. When it is afraid, it rolls up into a ball",
    "whale": "a whale lives in the sea, but it breathes air. The blue whale is the largest animal that has ever lived",
    "penguin": "a penguin is a bird that cannot fly, but it swims very well. It lives in the cold south",
    "camel": "a camel lives in the desert and can walk for days without water",
    "elephant": "an elephant is the largest animal on land. It has a long trunk and a good memory",
    "giraffe": "a giraffe has a very long neck and eats the leaves of tall trees",
    "frog": "a frog lives in the water and on land. It begins its life as a tadpole",
    "bee": "a bee collects nectar from flowers and makes honey from it",
    "cat": "a cat is a quiet hunter with soft paws. It sleeps most of the day",
    "dog": "a dog is a loyal animal that has lived with people for thousands of years",
    "snail": "a snail carries its house on its back and is never in a hurry",
    "dragon": "a dragon is an animal that lives only in stories. It has wings, breathes fire and guards gold",
    "unicorn": "a unicorn is a horse with a single horn, and it lives only in stories",
    "wolf": "a wolf lives in a pack and howls at night",
    "horse": "a horse is a strong and fast animal. It can sleep while it stands",
    "bat": "a bat is not a bird, but it flies. It finds its way with its ears",
    "turtle": "a turtle has a hard shell and can live for more than a hundred years",
    "squirrel": "a squirrel hides nuts for the winter and forgets some of them, and these become trees",
    "beaver": "a beaver cuts down trees with its teeth and builds dams",
    "mole": "a mole lives under the ground and digs long tunnels",
    "crow": "a crow is a black bird and one of the cleverest of all",
    "robot": "a robot is a machine that can move and work by itself",
}


def sketch(rng: random.Random) -> str:
    """One of the short pieces."""
    form = rng.randrange(6)
    slots = cast(rng) | {"name": rng.choice(GIRLS + BOYS), "village": rng.choice(VILLAGES)}
    if form == 0:
        return join([write(part, rng, slots) for part in DREAMS], rng)
    if form == 1:
        thing = rng.choice(list(FAVORITES))
        choice, other = rng.sample(list(FAVORITES[thing]), 2)
        return expand(
            rng.choice(OPINIONS),
            rng,
            slots | {"thing": thing, "choice": choice, "other": other, "reason": FAVORITES[thing][choice]},
        )
    if form == 2:
        return instruct(rng, rng.choice(list(CRAFTS)))
    if form == 3:
        return " ".join(expand(part, rng, slots) for part in NEWS)
    if form == 4:
        return beast(rng, rng.choice(list(BEASTS)))
    return expand(rng.choice(THOUGHTS), rng, slots)


def instruct(rng: random.Random, craft: str) -> str:
    """How something is done."""
    tools, one, two, three = CRAFTS[craft]
    first, second, third = tools.split("|")
    slots = {"craft": craft, "tools": f"{first}, {second} and {third}", "one": one, "two": two, "three": three}
    return expand(rng.choice(INSTRUCTIONS), rng, slots)


def beast(rng: random.Random, animal: str) -> str:
    """What an animal is like."""
    return expand(BEASTS[animal] + ".[| It is in many of my tales.|| Shall I tell you a story about one?]", rng, {})
