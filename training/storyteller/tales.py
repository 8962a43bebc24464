"""Short tales: somebody lives somewhere, wants or loses or fears something, meets others, and comes to an end."""

from __future__ import annotations

import random

from grammar import polish, write
from lexicon import (
    ANIMALS,
    BOYS,
    COLORS,
    CREATURES,
    FEARS,
    FOODS,
    GIRLS,
    GOALS,
    MOODS,
    MORALS,
    PAIRS,
    PEOPLE,
    PLACES,
    RIDDLES,
    ROYALS,
    TRAITS,
    TREASURES,
    WEATHER,
    WISHES,
)
from plots import PLOTS

PRONOUNS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}

OPENINGS = (
    "once upon a time in a land far away, there lived a {traits} {kind} named {hero}.",
    "once upon a time in a land far away, there lived a {traits} {kind}. {His} name was {hero}.",
    "once upon a time in a land far away, a {traits} {kind} named {hero} lived {in_place}.",
    "once upon a time, {in_place}, there lived a {traits} {kind} named {hero}.",
    "once upon a time there was a {traits} {kind} [named|called] {hero}, who lived {in_place}.",
    "once there was a {traits} {kind} who lived {in_place}. {His} name was {hero}.",
    "there was once a {traits} {kind} named {hero}. {He} lived {in_place}.",
    "long ago, {in_place}, there lived a {traits} {kind} named {hero}.",
    "long, long ago, when [animals could still speak|the moon was young|wishes still came true], a {traits} {kind} "
    "named {hero} lived {in_place}.",
    "far away, beyond [the blue hills|the last mountain|seven rivers|the wide sea], there lived a {traits} {kind} "
    "named {hero}.",
    "{in_place} lived a {traits} {kind} named {hero}.",
    "{hero} was a {traits} {kind} who lived {in_place}.",
    "{hero} the {kind} lived {in_place}. {He} was [known to everybody as|thought to be] a {trait} {kind}.",
    "it was a dark and stormy night. {In_place}, a {traits} {kind} named {hero} could not sleep.",
    "{weather}, a {traits} {kind} named {hero} was sitting {near}.",
    "{weather}, {hero} the {kind} [could not sleep|woke up early|looked out of the window].",
    "if you go [over the hill|down the river|past the last house] and then turn left, you come to {place}. A "
    "{traits} {kind} lived there, whose name was {hero}.",
    "my grandmother told me this story. {In_place} there lived a {traits} {kind}, and the name of the {kind} was "
    "{hero}.",
    "once, when [the rivers ran with honey|the world was smaller|my grandfather was a boy], there lived a {traits} "
    "{kind} named {hero} {in_place}.",
    "not far from here, {in_place}, a {traits} {kind} lived. Everybody called {him} {hero}.",
    "there are many stories about {hero}, the {traits} {kind}, but this one is [true|my favorite|the "
    "shortest|almost true].",
    "the {kind} was called {hero}, and {he} was [as {trait} as they come|a rather {trait} {kind}].",
    "it was [cold|late|raining] {near}, and {hero}, a {traits} {kind}, was [awake|hungry|bored].",
    "a [long|very long] time ago, a {traits} {kind} lived {in_place}. {His} name was {hero}.",
    "the old {person} of the town likes to tell the story of {hero}, a {traits} {kind}.",
    "a {traits} {kind} named {hero} lived {in_place}.",
    "one day, a {traits} {kind} named {hero} was sitting {near}.",
    "deep in the forest, where [the trees are as old as the hills|no road leads|the owls live], there lived a "
    "{traits} {kind} named {hero}.",
    "by the sea, in a [small white|crooked|narrow] house, there lived a {traits} {kind} named {hero}.",
    "the {traits} {kind} {hero} lived {in_place}[, all alone|, and had never left it|, like {his} father before "
    "{him}].",
    "nobody {near} remembered a time without {hero}, the {traits} {kind}.",
    "this is the story of {hero}, a {traits} {kind} who lived {in_place}.",
)
HABITS = (
    "",
    "",
    "every [morning|day], {he} [swept the floor|fed the birds|walked to {goal}|looked out of the window] and "
    "[sang|whistled] a [little|quiet|merry] song.",
    "{he} had [a {color} hat|a {color} coat|a {color} door|a small {color} boat] and [no money at all|many friends|a "
    "warm heart|a big appetite].",
    "{he} liked {food} [best of all|more than anything|very much], and {he} [always had some in {his} pocket|ate "
    "some every day|never had enough].",
    "everybody [liked|knew] {him}, because {he} [never told a lie|always had time for others|told the best "
    "stories|laughed so loudly].",
    "{he} [worked hard|was seldom bored|slept long] and [asked for little|was happy most of the time|dreamed a great "
    "deal].",
    "{his} house was [full of books|full of clocks|always warm|the smallest of all], and [the door was never "
    "locked|there was always a pot of soup on the stove|it smelled of {food}].",
    "in {his} pocket {he} carried [a piece of string|three buttons|a stone from the sea|an old letter], [for "
    "luck|because one never knows|and {he} never said why].",
    "on Sundays {he} [went fishing|played chess against {himself}|polished {his} shoes|counted the clouds], and on "
    "Mondays {he} [was tired|started all over again|forgot all about it].",
    "{he} was so [thin|tall|small|round] that [the wind could lift {him}|{he} had to bend at every door|the other "
    "children laughed|{his} coat never fit].",
    "nobody knew how old {he} was, [not even {hero}|and nobody dared to ask].",
)
MEETINGS = (
    "on the way {he} met a {trait2} {kind2} named {friend}.",
    "at {goal}, {he} met a {trait2} {kind2} named {friend}.",
    "soon a {trait2} {kind2} came along. [It was|The name of the {kind2} was] {friend}.",
    "there {he} found a {trait2} {kind2}, whose name was {friend}.",
    "{he} had not gone far when {he} met {friend}, a {trait2} {kind2}.",
    "a {trait2} {kind2} named {friend} was sitting there [in the grass|on a stone|under a tree], [eating "
    "{food}|mending a net|reading a book|humming a song].",
)
QUESTIONS = (
    '"[where are you going|why are you so sad|what are you looking for|what is the matter], {hero}?" asked {friend}.',
    '"Good [morning|day], {hero}," said {friend}. "[Why do you look so sad|Where are you going|What brings you here]?"',
    '"Hello," said {friend}. "You look [tired|sad|worried|as if you need help]."',
)
ASIDES = (
    "the wind [smelled of rain|carried the scent of pine trees|played with the leaves].",
    "somewhere [an owl called|a dog barked|a bell rang|a cricket sang].",
    "a [cloud|leaf|feather] [drifted by|came down slowly].",
    "it began to [rain|snow], [softly at first|in large slow drops|as if the sky had waited for it].",
    "[the fog lifted|the first stars came out|the sun broke through the clouds], and [the world looked new|for a "
    "moment everything was still|the dogs stopped barking].",
    "far away a train whistled[, or perhaps it was the wind||, and then it was quiet again].",
    "the [apple trees|old walls|fields] [were white with frost|were full of light|smelled of summer].",
    "time passed as it does in stories, [quickly and without a sound|faster than one thinks].",
    "the [river|stream] [murmured|whispered|sang] over its stones.",
    "[a crow watched from a fence|a snail crossed the path|two swallows flew over the roof], and [said "
    "nothing|nobody noticed].",
    "the [shadows grew long|light turned to gold|air was cool and clean|grass was wet with dew].",
    "it was so quiet that [one could hear the snow fall|one could hear a leaf fall|even the mice held their breath].",
    "[smoke rose from a chimney far away|lanterns were lit in the windows|the church clock struck seven].",
    "the moon [climbed over the trees|hid behind a cloud|looked at itself in the water].",
)
ENDINGS = (
    "and they lived happily ever after.",
    "from that day on, {hero} and {friend} were the best of friends.",
    "and if {hero} has not moved away, {he} still lives there today.",
    "that evening they sat by the fire, [ate {food}|drank tea|told stories] and [laughed|sang] until the stars came "
    "out.",
    "{hero} never forgot that day.",
    '{hero} smiled. "{moral2}," {he} said, and {friend} [nodded|agreed].',
    "and so {hero} learned that {moral}.",
    "that night {hero} slept [well|deeply|better than ever], and {he} dreamed of [the sea|the stars|tomorrow|{food}].",
    "and that is the end of the story.",
    "the lights went out {near}, one by one, and only {hero} was still awake, smiling in the dark.",
    "if you walk past {goal} on a quiet evening, you can still hear {hero} laugh.",
    '"[And tomorrow|What shall we do tomorrow]?" asked {friend}. "Tomorrow," said {hero}, "[we begin again|we will '
    'see|we sleep late]."',
    "{hero} looked up at the stars. There were more of them than ever before.",
    "people there still tell this story to their children. They say that {moral}.",
    "The moral of the story is that {moral}.",
)


def cast(rng: random.Random, kind: str | None = None, name: str | None = None) -> dict[str, str]:
    """The values of all slots of one tale: who and what there is stays the same to its end."""
    weather = [write(template, rng, {}) for template in rng.sample(WEATHER, 2)]
    riddle, answer = rng.choice(RIDDLES)
    place = rng.choice(list(PLACES))
    wish, fear = rng.choice(list(WISHES)), rng.choice(list(FEARS))
    treasures, goals, foods, people = (rng.sample(words, 2) for words in (TREASURES, GOALS, FOODS, PEOPLE))
    gender = rng.choice(("he", "she"))
    if name in GIRLS or kind in ROYALS["she"]:
        gender = "she"
    elif name in BOYS or kind in ROYALS["he"]:
        gender = "he"
    gender2 = rng.choice(("he", "she"))
    kind = kind or draw_kind(rng, gender)
    kind2 = draw_kind(rng, gender2)
    while kind2 == kind:
        kind2 = draw_kind(rng, gender2)
    hero = name or draw_name(rng, kind, gender)
    friend = draw_name(rng, kind2, gender2)
    while friend == hero:
        friend = draw_name(rng, kind2, gender2)
    he, him, his, himself = PRONOUNS[gender]
    he2, him2, his2, himself2 = PRONOUNS[gender2]
    return {
        "hero": hero,
        "he": he,
        "him": him,
        "his": his,
        "himself": himself,
        "kind": kind,
        "friend": friend,
        "he2": he2,
        "him2": him2,
        "his2": his2,
        "himself2": himself2,
        "kind2": kind2,
        "kind3": rng.choice([animal for animal in ANIMALS if animal not in (kind, kind2)]),
        "traits": rng.choice(PAIRS if rng.random() < 0.6 else TRAITS),
        "trait": rng.choice(TRAITS),
        "trait2": rng.choice(TRAITS),
        "place": place,
        "in_place": f"{'on' if place in ('a farm on a hill', 'an island') else 'in'} {place}",
        "near": PLACES[place],
        "color": rng.choice(COLORS),
        "goal": goals[0],
        "goal2": goals[1],
        "treasure": treasures[0],
        "treasure2": treasures[1],
        "food": foods[0],
        "food2": foods[1],
        "person": people[0],
        "person2": people[1],
        "animal": rng.choice(ANIMALS),
        "wish": wish,
        "wished": WISHES[wish],
        "fear": fear,
        "comfort": FEARS[fear],
        "riddle": riddle,
        "answer": answer,
        "weather": weather[0],
        "weather2": weather[1],
    }


def draw_kind(rng: random.Random, gender: str) -> str:
    """What somebody is."""
    return rng.choice(rng.choices((ANIMALS, PEOPLE, ROYALS[gender]), (60, 28, 12))[0])


def draw_name(rng: random.Random, kind: str, gender: str) -> str:
    """A name that fits."""
    names = GIRLS if gender == "she" else BOYS
    return rng.choice(CREATURES if kind in ANIMALS and rng.random() < 0.5 else names)


def tale(rng: random.Random, kind: str | None = None, name: str | None = None, *, is_short: bool = False) -> str:
    """A whole tale in a few paragraphs."""
    plot = rng.choice(list(PLOTS))
    slots = cast(rng, kind, name)
    if lessons := PLOTS[plot]:
        moral = MORALS[rng.choice(lessons)]
        slots |= {"moral": moral, "moral2": moral[0].upper() + moral[1:]}
    slots |= {"meeting": rng.choice(MEETINGS), "question": rng.choice(QUESTIONS)}
    paragraphs = [begin(rng, slots, is_short=is_short), *(write(scene, rng, slots) for scene in plot)]
    if lessons or rng.random() < 0.3:
        paragraphs.append(write(rng.choice(endings(plot, bool(lessons))), rng, slots))
    if not is_short and rng.random() < 0.6:
        paragraphs[rng.randint(2, len(paragraphs) - 2)] += " " + polish(write(rng.choice(ASIDES), rng, slots))
    return join(paragraphs, rng)


def begin(rng: random.Random, slots: dict[str, str], *, is_short: bool) -> str:
    """Who it is about."""
    # The commonest prompts are continued in all the ways there are.
    openings = OPENINGS[:5] if rng.random() < 0.25 else OPENINGS
    opening = write(rng.choice(openings), rng, slots)
    if not is_short:
        opening = f"{opening} {write(rng.choice(HABITS), rng, slots)}".strip()
        if "night" not in opening and rng.random() < 0.2:
            opening += " " + write(MOODS + ".", rng, slots)
    return opening


def endings(plot: tuple[str, ...], has_moral: bool) -> list[str]:
    """Those that fit after a plot: no second lesson."""
    is_told = any("{moral" in scene for scene in plot) or not has_moral
    return [ending for ending in ENDINGS if not (is_told and "{moral" in ending)]


def join(paragraphs: list[str], rng: random.Random) -> str:
    """Paragraphs, some of them run together."""
    text = polish(paragraphs[0])
    for paragraph in paragraphs[1:]:
        text += ("\n\n" if rng.random() < 0.55 else " ") + polish(paragraph)
    return text
