"""Scenes for the stage, in the manner of old plays: speakers in capitals, and thou and thee."""

from __future__ import annotations

import random

from grammar import expand, polish, write

PLAYERS = (
    "ROMEO JULIET HAMLET OPHELIA KING QUEEN FOOL NURSE HORATIO MERCUTIO BENVOLIO DUKE LADY CAPTAIN SERVANT "
    "MESSENGER GHOST PRINCE VIOLA PORTIA BRUTUS CAESAR LEAR CORDELIA PUCK OBERON TITANIA PROSPERO MIRANDA ARIEL "
    "FRIAR MACBETH WITCH SOLDIER"
).split()
TITLES = "[my lord|good friend|gentle friend|sweet friend|sir|good {other}|noble {other}|dear {other}]"
GREETINGS: tuple[str, ...] = (
    "good morrow, {title}. [What news|How dost thou|Whither away so early]?",
    "well met, {title}! [I have sought thee all the day|What brings thee here at such an hour]?",
    "who comes here? [Speak, for I cannot see thy face|Is it thou, {other}]?",
    "[O {other}, {other}|Come hither, {other}], [why art thou so late|where hast thou been|what weighs upon thy "
    "heart]?",
    "[what light is this|what sound is that]? [Is it the morning|It is the {bird}], and [the night is almost "
    "spent|all the garden listens].",
)
NEWS = (
    "[the king|the duke|the queen] hath [lost his crown|lost a ring of gold|left the city], and [no man knows "
    "where to look|all the court is in an uproar].",
    "I bring a letter, sealed with [red|black] wax, and [I dare not open it|it is for thine eyes alone].",
    "the ships are come home, {title}, [all but one|with silk and spices|and the harbor is full of song].",
    "I have not slept. [I dreamed of the sea|I saw a ghost upon the stair|My thoughts do walk about like watchmen "
    "in the dark].",
    "[they say|I have heard] that [the moon will hide her face tonight|the forest moves|a stranger waits without "
    "the gate].",
    "nothing, {title}, but that [the world grows old|the cook hath burned the supper|the roses are in bloom].",
    "I am in love, {title}, and [I cannot eat|I write bad verses|there is no doctor for it].",
)
REPLIES = (
    "[then let us go at once|then we must make haste]. [The night hath ears|Time is a thief, and steals while we "
    "do speak].",
    "[alas|O heavy news|O happy hour]! [My heart is like a ship without a sail|My heart doth leap like any hare in "
    "spring|I could both laugh and weep].",
    "peace, {title}. [A quiet word doth travel far|Who speaks in haste repents at leisure|Not every cloud doth "
    "carry rain].",
    "[thou jestest|thou speakest in riddles]. [Say it again, and slowly|Art thou quite well]?",
    "what is a crown? A circle, and a weight upon the head.",
    "what is gold? A thing that shines, and cannot keep thee warm.",
    "what is a name? A breath, and yet we turn when it is called.",
    "what is a friend? [A lantern in a stranger's hand|One soul that hath two coats].",
    "[I fear no ghost|I am not afraid], {title}; [I fear an empty cup much more|but I would rather be afraid at home].",
    "[be of good cheer|take heart], {title}. [The longest night doth end with birds|There is no winter but it hath "
    "a spring].",
    "[I prithee|I pray thee], [hold the lantern higher|say no more of it|let me think]. [There is some mischief "
    "here|I like it not].",
    "[by my faith|in truth], [thou art a better poet than a friend|I never heard so sad a tale, nor one so long|I "
    "would I had thy courage, or thy shoes].",
    "[love is a fever, and the nurse is time|Love is a door; go in, or shut it fast|They that have loved do know "
    "what silence means].",
)
QUESTIONS = (
    "[and what wilt thou do now|what shall we do]?",
    "[dost thou believe it|canst thou keep a secret]?",
    "[shall I tell thee what I think|wilt thou come with me]?",
    "[where is the {bird} that sang so late|who knows of this besides ourselves]?",
)
PARTINGS = (
    "[farewell|good night|adieu], {title}. [Parting is a little winter|We shall meet again before the moon is "
    "old|Sleep well, and dream of better things].",
    "[I go|I must be gone]. [The {bird} calls|The morning is at hand], and [day is a friend that waits for no "
    "man|I have promises to keep].",
    "[come, take my hand|come then, let us in]. [The supper will be cold|The rest is but a walk, and we are two].",
)
MONOLOGUES = (
    "[to wake, or not to wake|to go, or not to go|to speak, or not to speak]: that is the question.\n[Whether it "
    "is wiser to lie still|Whether the tongue be braver than the ear],\n[and let the morning pass the window "
    "by|and keep the heart's own counsel in the dark],\n[or rise, and by one step begin the day|or say one word, "
    "and so undo a year].",
    "[how sweet the moonlight sleeps upon the wall|how still the garden is, how deep the night]!\n[The {bird} hath "
    "put away her silver flute|The flowers close their small and weary eyes],\n[and I alone am waking in the "
    "world|and all the stars stand by to hear us breathe].\n[O {other}, wert thou here, it were enough|O night, be "
    "long; O morning, be thou late].",
    "[I had a kingdom once, and lost it all|I had a friend, and called him not by name].\n[A king is but a man who "
    "may not sneeze|A word unsaid is heavier than a stone].\n[Now I have bread, a stool, a window seat|Now every "
    "road I walk doth lead to him],\n[and never was I half so rich before|and every bird doth ask me where he is].",
)
SETTINGS = (
    "",
    "",
    "",
    "A garden. Night.\n\n",
    "A street in the city.\n\n",
    "Before the castle. Enter {self} and {other}.\n\n",
    "A room in the palace.\n\n",
    "The forest. Thunder.\n\n",
    "A ship at sea.\n\n",
)


def play(rng: random.Random) -> str:
    """A scene of two or three people."""
    players = rng.sample(PLAYERS, rng.choice((2, 2, 3)))
    bird = rng.choice(("nightingale", "lark", "owl", "raven", "swallow"))
    lines, parts = [], [GREETINGS, NEWS]
    parts += [REPLIES if rng.random() < 0.7 else rng.choice((QUESTIONS, NEWS)) for _ in range(rng.randint(2, 7))]
    if rng.random() < 0.3:
        parts[rng.randrange(len(parts))] = MONOLOGUES
    parts.append(PARTINGS)
    used: set[str] = set()
    for number, part in enumerate(parts):
        speaker, listener = players[number % len(players)], players[(number - 1) % len(players)]
        slots = {"title": TITLES, "other": listener.title(), "bird": bird}
        templates = [line for line in part if line not in used] or list(part)
        used.add(template := rng.choice(templates))
        if part is REPLIES and rng.random() < 0.3:
            template = f"{template} {rng.choice(QUESTIONS)}"
        lines.append(f"{speaker}:\n{polish(write(template, rng, slots))}")
    setting = expand(rng.choice(SETTINGS), rng, {"self": players[0], "other": players[1]})
    return (setting + "\n\n" if setting else "") + "\n\n".join(lines)
