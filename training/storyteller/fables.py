"""Short texts about one turn of events: fables, mysteries with a clue, and memories."""

from __future__ import annotations

import random

from grammar import expand, polish, write
from lexicon import BOYS, GIRLS
from tales import cast, join

FABLES = (
    (
        "a {kind} found [a piece of cheese|a cake|a pot of honey] and was about to eat it. A {kind3} came along "
        'and said: "[What a beautiful voice you must have|I hear that you can whistle]. [Sing for me|Let me hear '
        'it]." The {kind} opened {his} mouth, and the food fell down. The {kind3} [ate it|ran away with it]. "[A '
        'sweet word is expensive|Praise costs more than bread]," it said.'
    ),
    (
        'a {kind} and a {kind3} looked at the same [glass|cup]. "[It is half empty|Only half is left]," said the '
        '{kind}. "It is half full," said the {kind3}. While they argued, a {animal} came and drank it. "[Now it '
        'is simple|Now you agree]," said the {animal}.'
    ),
    (
        'a {trait} {kind} carried a stone in each pocket. "[Why do you do that|Are they not heavy]?" asked the '
        '{kind3}. "So that the wind does not blow me away," said the {kind}. "[There is no wind here|But it is '
        'quite still]," said the {kind3}. "[You see|There you are]," said the {kind}, "it works."'
    ),
    (
        'a {kind} and a {kind3} met on a narrow bridge. "[Make room|I was here first]," said the {kind}. "[You '
        'make room|I am older]," said the other. They stood there until evening. Then [the bridge grew tired and '
        "broke|it began to rain], and they both got wet. Since then they say to each other: [go ahead|after you]."
    ),
    (
        'a {kind} asked the {kind3} how to become wise. "Make mistakes," said the {kind3}. "[How many|And how '
        'do I know when I have made enough]?" asked the {kind}. "[You will stop counting|When you laugh about '
        'them]," said the {kind3}.'
    ),
    (
        "a {trait} {kind} planted [a coin|a button] in the garden and watered it every day. Everybody laughed. In "
        'spring [a rose|an apple tree] grew there. "That is not from the coin," said the {kind3}. "[I know|Of '
        'course not]," said the {kind}. "[It is from the water|It is from the patience]."'
    ),
    (
        'a {kind} wanted to live in the palace of the lion. "[You may stay|Gladly]," said the lion, "[as long '
        'as I am not hungry|but I get up late and hungry]." The {kind} thought about it. "[My hole has a low '
        'door|My house is small]," it said, "but [everybody who comes in is a friend|I know what is for dinner '
        'there, and it is not me]."'
    ),
    (
        "the {kind} boasted that {he} could carry the heaviest load. The {kind3} put stone after stone on {his} "
        'back. "Is it heavy?" asked the {kind3}. "[Not at all|Light as a feather]," groaned the {kind}. Then a '
        'butterfly sat down on top, and the {kind} fell over. "[It was the butterfly|That butterfly was too '
        'fat]," said the {kind}.'
    ),
    (
        'a {kind} lived next to a river and complained about the noise. "[Be quiet|Must you talk all night]," '
        "{he} said. One summer the river dried up. The {kind} lay awake in the silence. [When the rain came|In "
        'autumn], {he} said to the river: "[Go on. I am listening.|What were you saying?]"'
    ),
    (
        "an old {kind} taught a young {kind} to fish. On the first day they caught nothing. On the second day they "
        'caught nothing. "[When do we begin|Why do we come here]?" asked the young one. "[Did you see the '
        'heron|Did you hear the reeds]?" asked the old one. "Yes." "[Then it was a good catch|Then you have '
        'begun]."'
    ),
    (
        "a {kind} saw the moon in a puddle and wanted to own it. {he} [built a fence around the puddle|put a lid "
        'on it]. In the morning the moon was gone. "Thieves!" cried the {kind}. [The sun laughed and said '
        'nothing|"It comes to those who have no fence," said the {kind3}].'
    ),
    (
        'the {kind} and the {kind3} shared a blanket. It was too short. "[You have more|Your side is longer]," '
        'said the {kind}, and pulled. "[No, you have more|Mine has holes]," said the {kind3}, and pulled. In the '
        "morning each had half a blanket, and both had a cold. [The next night they moved closer together|Then "
        "they learned to sew]."
    ),
    (
        'every morning a {kind} greeted {his} reflection in the pond. "[You look tired|You are getting old]," '
        '{he} said one day. "[You, too|I only say what you say]," said the pond. The {kind} smiled, and the pond '
        "[smiled back|looked ten years younger]."
    ),
    (
        "a {kind} found a nut that {he} could not crack. {he} asked the {kind3}, who [sat on it|threw it at a "
        "wall]. {he} asked the {animal}, who only laughed. At last {he} [buried it and forgot it|gave up and "
        "buried it]. Years later there was a tree, and it [dropped a hundred nuts on {his} head|threw down nuts "
        "every autumn, already open]."
    ),
    (
        'a {trait} {kind} never said please. One day {he} got stuck in a hollow log. "Pull me out," {he} said. '
        'Nobody came. "Pull me out, quickly!" Nobody came. "[Pull me out, please|Please]," {he} said, very '
        "softly, and [the whole forest came|seven neighbors pulled at once]."
    ),
)

SIGNS = {  # what somebody does, and what it leaves behind
    "baker": ("flour", "white powder"),
    "gardener": ("earth", "a crumb of earth"),
    "fisherman": ("fish scales", "a silver fish scale"),
    "painter": ("paint", "a drop of blue paint"),
    "chimney sweep": ("soot", "a black fingerprint"),
    "tailor": ("thread", "a piece of red thread"),
    "beekeeper": ("honey", "something sticky and sweet"),
    "carpenter": ("sawdust", "a little heap of sawdust"),
    "musician": ("resin", "a broken violin string"),
    "shepherd": ("wool", "a tuft of wool"),
    "blacksmith": ("iron", "a small nail"),
    "potter": ("clay", "a thumbprint of wet clay"),
    "miller": ("grain", "three grains of wheat"),
    "postman": ("stamps", "a torn stamp"),
    "clockmaker": ("oil", "a tiny brass wheel"),
    "cook": ("onions", "the smell of onions"),
}
REASONS = (
    ("I only wanted to repair it", "It had a crack, and I wanted it to be a surprise"),
    ("I only wanted to look at it once", "I have never owned anything so beautiful"),
    ("I wanted to give it to my mother for her birthday", "I would have brought it back on Monday"),
    ("it looked so lonely in the dark", "I only wanted to keep it company"),
    ("I thought that nobody would miss it", "I see now that I was wrong"),
)
MYSTERIES = (
    "{weather2}, the {treasure} of the [mayor|queen|old countess|museum] was gone. [The window was open|The door "
    "was locked, and the window was shut]. {hero}, a {traits} {kind} who [solved such cases|was known for {his} "
    "sharp eyes], was called at once.",
    "[{he} put on {his} glasses and knelt down|{he} walked around the room three times|{he} drank a cup of tea and "
    "looked at the floor]. Nobody had noticed it, but there, [under the chair|on the windowsill|beside the empty "
    'box], was {clue}. "[Interesting|Aha|Well, well]," said {hero}.',
    '"Who was in the house yesterday?" asked {hero}. "Only three people," said the servant. "The {a}, the {b} '
    'and the {c}."',
    "{hero} talked to all of them. [The {a} was angry|The {a} answered politely]. [The {b} looked at the "
    "ceiling|The {b} talked about the weather]. [The {c} wanted to go home|The {c} offered {him} some {food}]. "
    "{hero} looked only at their [hands|shoes|sleeves].",
    '"It is quite simple," said {hero}. "We found {clue}. And who of us works with {stuff}? [Only one '
    'person|There is only one]: the {culprit}."',
    'the {culprit} turned [red|pale]. "{reason1}," he said. "{reason2}." And he took the {treasure} out of '
    "[his hat|his coat|his bag].",
    "[everybody was silent|the room was very quiet]. Then {ending}",
)
MYSTERY_ENDINGS = (
    'the owner [laughed|smiled]. "[You could have asked|Why did you not say so]," said the owner. "[Come and '
    'look at it every Sunday|We will drink tea now]."',
    '{hero} closed {his} notebook. "[Nothing was stolen|The case is closed]," {he} said. "[Something was only '
    'borrowed without a word|And I am hungry]."',
    "the {culprit} [said that he was sorry|gave it back], and he had to [sweep the yard for a week|bring {food} "
    "for everybody]. [There was enough for all|It was the best part of the case].",
)
MEMORIES = (
    "when I was a child, we lived {in_place}. [In the evening|On Sundays|In winter], my "
    "[grandmother|grandfather|aunt] told me stories about a {traits} {kind}. [I believed every word|I asked for "
    "the same one every night].",
    "one story I remember well. The {kind} had a {treasure}, and [it sang when it rained|it was warm like a "
    "hand|nobody was allowed to touch it]. [I do not remember how it ended|In the end somebody gave it away].",
    "[many years later|last summer|yesterday], I found a {treasure} [in an old box|in the attic|at a market]. I "
    "held it in my hand, and [for a moment I was six years old again|I could hear the rain on that roof|I smelled "
    "{food}].",
    "[I put it on the windowsill|I keep it on my desk now]. [When it rains, I listen|Sometimes my daughter asks me "
    "about it]. [And I begin: once upon a time|Then I tell her about the {kind}].",
)
ADVENTURES = (
    "I had never [missed a train|told a lie|talked to a {kind}] in my life, until [that Tuesday|last Friday|the "
    "day of the great fog].",
    "I was [on my way to work|carrying {food} home|waiting for the bus] when a {trait} {kind} stopped me. "
    '"[Excuse me|Pardon me]," said the {kind}, "[have you seen a {treasure}|is this the way to {goal}|do you '
    'believe in dragons]?"',
    '"[Not today|I am afraid not|That depends]," I said. [One should always be polite to a {kind}|I did not know '
    'what else to say]. The {kind} sighed. "[It is always the same|Nobody ever has time]," it said.',
    "[I looked at my watch|I thought of my work]. Then I looked at the {kind}, who had [kind eyes|holes in its "
    'shoes|a very small hat]. "[Come on|All right]," I said. "[I will help you|Let us go together]."',
    "we went to {goal} together. On the way we [ate the {food}|talked about {fear_of}|got lost twice], and [I "
    "laughed more than in the whole year before|I forgot what I had been worried about].",
    "[there it was, of course, in the place where one looks last|It was not there, but that did not matter any "
    'more]. The {kind} [bowed|shook my hand with both paws]. "[You are not as busy as you look|I owe you a '
    '{color} button]," it said, and was gone.',
    "[at work nobody believed me|I came three hours late]. But [in my pocket there was a {color} button|the next "
    "day a {color} button came with the mail], and [I wear it on my coat|I would not sell it for anything].",
)


def fable(rng: random.Random) -> str:
    """An animal or two, and a few sentences."""
    slots = cast(rng)
    start = rng.choice(("", "", "", "Once ", "One day ", "Long ago, "))
    text = write(rng.choice(FABLES), rng, slots)
    if not start and rng.random() < 0.4 and text.startswith("a "):
        text = "the " + text[2:]
    return polish(start + text)


def mystery(rng: random.Random) -> str:
    """Something is gone; three suspects and one clue."""
    suspects = rng.sample(list(SIGNS), 3)
    culprit = rng.choice(suspects)
    stuff, clue = SIGNS[culprit]
    first, second = rng.choice(REASONS)
    slots = cast(rng) | dict(zip("abc", suspects, strict=True))
    slots |= {
        "culprit": culprit,
        "stuff": stuff,
        "clue": clue,
        "reason1": first[0].upper() + first[1:],
        "reason2": second,
    }
    slots["ending"] = rng.choice(MYSTERY_ENDINGS)
    return join([write(scene, rng, slots) for scene in MYSTERIES], rng)


def memory(rng: random.Random) -> str:
    """Something somebody remembers."""
    slots = cast(rng)
    return join([write(scene, rng, slots) for scene in MEMORIES], rng)


def adventure(rng: random.Random) -> str:
    """Something that happened to me."""
    slots = cast(rng)
    slots["fear_of"] = rng.choice(("the stars", "our mothers", "music", "soup", "the meaning of life", "trains"))
    return join([write(scene, rng, slots) for scene in ADVENTURES], rng)


BEDTIME = (
    "good night, {thing}. Good night, {thing2}.\nGood night, {animal} [in the tree|on the hill|under the "
    "bed].\nThe [moon|lamp] is [low|yellow], the [wind|house] is [still|slow].\n[Tomorrow|In the morning] we shall "
    "[begin again|see what there is].\nGood night, {name}.",
)


def bedtime(rng: random.Random) -> str:
    """Good night to this and that."""
    things = rng.sample("moon|chair|door|river|old tree|little house|garden|street|star|boat|kitchen|cat".split("|"), 2)
    slots = cast(rng) | {"thing": things[0], "thing2": things[1], "name": rng.choice(GIRLS + BOYS)}
    return expand(rng.choice(BEDTIME), rng, slots)
