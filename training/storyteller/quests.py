"""Longer tales that are put together: a need, a journey, helpers with gifts, obstacles that the gifts overcome."""

from __future__ import annotations

import random

from grammar import polish, write
from tales import ASIDES, begin, cast, join

# What is wrong, what helps, and what happens when it comes.
NEEDS = (
    (
        "the well {near} had run dry",
        "the blue stone that calls the rain",
        "{hero} laid the blue stone into the well, and it "
        "[gurgled like a sleepy child|coughed three times]. Then the water came, [clear and cold|up to the brim]",
    ),
    (
        "winter would not end {near}",
        "the key of spring",
        "{hero} turned the key of spring in the air, and something clicked. [The "
        "ice cracked|The icicles began to drip], and [a single snowdrop came up|the first swallow came over the hill]",
    ),
    (
        "nobody {near} could sleep any more",
        "a bag of the sand of dreams",
        "{hero} blew a pinch of the sand over every roof. [The mayor fell asleep in the middle of a speech|The "
        "dogs were the first to snore], and [soon there was not a light left|everybody slept for two days]",
    ),
    (
        "all the colors had gone from the flowers {near}",
        "the jar in which the rainbow lives",
        "{hero} opened the jar, and the rainbow [jumped out like a cat|stretched and yawned]. [It ran over every "
        "garden|It rolled down the hill], and where it had been, the flowers were {color} again",
    ),
    (
        "the bells {near} had lost their sound",
        "the note that the wind had stolen",
        "{hero} let the note go under the great bell. It rang [once, softly|so loudly that the pigeons fell off "
        "the roof], and all the other bells [answered|joined in]",
    ),
    (
        "the grandmother of {hero} was ill, and no doctor could help",
        "the silver flower that grows in one place only",
        "{hero} made tea from the silver flower. The old woman [drank it and made a terrible face|took one sip]. "
        '"[That tastes of shoes|Where are my boots]," she said, and got up',
    ),
    (
        "the sun rose a little later {near} every day",
        "the golden alarm clock",
        "{hero} wound up the golden alarm clock and set it on the "
        "hill. The next morning it rang, and the sun [came up with red cheeks|was so startled that it rose at once]",
    ),
    (
        "a sad song hung over the houses {near}, day and night, and nobody knew where it came from",
        "the bird that knows every song",
        "the bird listened to the sad song, and then it sang the second half, which nobody had ever heard, and it "
        "was [a happy one|about coming home]. The sad song [sighed|smiled] and was quiet",
    ),
    (
        "the king had lost his heart and had become as cold as a stone",
        "the red glass heart",
        "{hero} put the glass heart into the king's hand. He [looked at it for a long time|held it against his "
        "ear]. Then he [opened the gates|pardoned everybody, even the cook], and asked how everybody was",
    ),
    (
        "the sea had become quite still, and the ships {near} could not leave",
        "the shell in which the wind sleeps",
        "{hero} put the shell to {his} lips and blew. At first there was only a whisper. Then [the flags moved|the "
        "sails woke up], and the ships [went out|danced at their ropes]",
    ),
    (
        "every clock {near} showed a different time",
        "the one true second",
        "{hero} let the one true second fall into the tower clock. [There was a soft tick|It made a sound like a "
        "drop of water], and all the clocks [began to agree|bowed to each other]",
    ),
    (
        "the books {near} had become empty overnight",
        "the ink that remembers",
        "{hero} let one drop of the ink fall on the first page. [The letters came running|The words came back in "
        "long lines], and some of them [were out of breath|had seen the world]",
    ),
)
ADVICE = (
    '"[Only one thing can help|There is a remedy]," said the old {person}. "You need {cure}. It is '
    '[kept|hidden] at {goal}[, a long way from here|, beyond the mountains|, where nobody goes]."',
    "in an old book {hero} read about {cure}. It was said to be at {goal}, [seven days away|at the end of the "
    'world, or a little before that]. "[Somebody must go|Then I will go there]," said {hero}.',
    'the {kind3} who [knew everything|read the newspaper every day] said: "What you need is {cure}. You will find '
    'it at {goal}, [if you find it|unless somebody was faster]."',
)
DEPARTURES = (
    "so {hero} packed some {food} and a warm coat, and {he} set out [before sunrise|the same night|without looking "
    "back].",
    '"[I will come back|Leave the light on]," said {hero}, and {he} took {his} stick and some {food}.',
    "{hero} was [not a hero|afraid], but {he} tied {his} shoes and went, [because nobody else did|because somebody "
    "had to].",
)
TOGETHER = (
    '"[Wait|Not without me]!" called somebody. It was {friend}, a {trait2} {kind2}. "[I have always wanted to '
    'see {goal}|Somebody must carry the {food}]," said {friend}, and came along.',
    "{his} friend {friend}, a {trait2} {kind2}, came along, [because {he2} had nothing better to do|although {he2} "
    "did not like to walk].",
)
BANTER = (
    '"[Are we there yet|Is it still far]?" asked {friend}. "[We have only just left|I can still see our '
    'house]," said {hero}.',
    '"Do you know the way?" asked {friend}. "No," said {hero}, "but [the way knows itself|I know where we started]."',
    "{friend} sang a song with [forty|ninety-nine] verses, and {hero} [joined in at the end of each|was glad when "
    "it was over].",
    '"[My feet hurt|I am hungry]," said {friend}. "[Mine, too|So am I]," said {hero}, and that helped a little.',
    "at night they lay in the grass and [counted the stars|gave names to the stars]. {friend} fell asleep at "
    "[eleven|number thirty].",
    '"What will you do when we are home again?" asked {friend}. "[Sleep|Eat {food2}]," said {hero}. "[And '
    'then|And you]?" "[The same|I will tell everybody that it was easy]," said {friend}.',
)
ALONE = (
    "{he} walked [all day|through three villages], and at night {he} slept [under a bush|in a barn].",
    "the road [went up and down|wound like a ribbon], and {hero} [sang to keep {himself} company|counted {his} steps].",
    "it rained, and then it stopped, and {hero} [got wet and got dry again|walked on].",
)
# Somebody needs help on the way: who, the trouble, what the hero does.
HELPERS = (
    (
        "an old woman",
        "was carrying a bundle of wood that was [bigger than she was|much too heavy for her]",
        "[took it from her and carried it to her door|carried it, though it was the wrong way]",
    ),
    (
        "a bird",
        "had been caught in a net and [beat its wings|could not get free]",
        "[cut the threads, one by one|bit through the net]",
    ),
    (
        "a fish",
        "lay on the sand and gasped for air",
        "[carried it back to the water in both hands|ran with it to the stream]",
    ),
    (
        "a beggar",
        "had not eaten for [two|three] days",
        "[shared the {food} with him, half and half|gave him the bigger half of the {food}]",
    ),
    (
        "a goat",
        "was stuck in the mud up to its [neck|beard]",
        "[pulled it out by the horns|pulled until they both sat in the mud]",
    ),
    ("a scarecrow", "had lost his hat and was freezing", "[gave him {his} own hat|knotted a hat out of straw for him]"),
    (
        "a snail",
        "wanted to cross the road, and a cart was coming",
        "[stopped the cart|carried the snail across, house and all]",
    ),
    (
        "a small boy",
        "had lost his way and was crying",
        "[brought him home to his mother|took his hand and found his village]",
    ),
    ("an ant", "was drowning in a puddle", "[held out a leaf|fished it out with a blade of grass]"),
    (
        "a ferryman",
        "was so lonely that he talked to his oars",
        "[sat with him until the moon rose|listened to him the whole night]",
    ),
    ("an old horse", "had a thorn in its hoof", "[pulled out the thorn|drew out the thorn and washed the hoof]"),
    (
        "a traveling musician",
        "had broken the last string of his fiddle",
        "[gave him a thread from {his} coat|spun him a new one]",
    ),
    (
        "a cat",
        "sat on a chimney and could not come down",
        "[climbed up and brought it down|built a stair of crates for it]",
    ),
    (
        "an owl",
        "had broken her glasses and could not read",
        "[read to her until she fell asleep|mended them with a piece of wire]",
    ),
)
THANKS = (
    '"[Thank you|You have a good heart]," said {helper}. "Take this {gift}. [You will need it|It is worth more '
    'than it looks]."',
    '"[Nobody else stopped|You are the first who stopped]," said {helper}, and gave {him} {gift_a}. "[Keep it '
    'well|One day it will help you]."',
    '{Helper} had no money, but [there was {gift_a}|gave {him} {gift_a}]. "[It is all I have|Think of me when you '
    'use it]," said {helper}.',
)
# A gift, what stands in the way, and how the gift helps.
GIFTS = {
    "a rope": (
        "the path ended at a deep gorge, and there was no bridge",
        "tied the rope to a tree and [climbed down on one side and up on the other|swung across with closed eyes]",
    ),
    "a candle": (
        "the way led through a cave that was as dark as [ink|the inside of a boot]",
        "lit the candle, and [a thousand bats wished {him} good night|the darkness stepped aside]",
    ),
    "a flute": (
        "before the gate sat a giant who let nobody through",
        "played the flute, [softly and slowly|a lullaby], until the giant [snored|laid his head on the gate and slept]",
    ),
    "a jar of honey": (
        "a bear stood on the path, and he was [in a very bad mood|as broad as a barn]",
        "gave him the jar of honey, and the bear [forgot what he was angry about|sat down and licked his paws]",
    ),
    "a mirror": (
        "a monster jumped out of the bushes and made a terrible face",
        "held up the mirror. The monster saw itself, [was frightened and ran away|began to giggle, and could not stop]",
    ),
    "a feather": (
        "an ogre caught {him} and wanted to cook {him} with [onions|parsley]",
        "tickled the ogre with the feather, until he "
        "[laughed so hard that he fell into his own pot|begged for mercy and opened the door]",
    ),
    "an umbrella": (
        "they stood on a cliff, and the way went on [far below|at its foot]",
        "opened the umbrella, jumped, and [floated down like a dandelion seed|sailed down past the surprised gulls]",
    ),
    "a ball of yarn": (
        "a maze lay in the way, with hedges as high as houses",
        "let the ball of yarn roll, and it [found the way by "
        "itself|unrolled behind {him}, so that no turn was taken twice]",
    ),
    "a walnut": (
        "the gate was locked, and the lock was as small as a bean",
        "cracked the walnut. Inside lay a tiny key, and it [fit|turned without a sound]",
    ),
    "a pair of boots": (
        "a swamp lay before them, brown and bubbling",
        "put on the boots, and they [walked over the mud as if it were a meadow|knew every stone in the swamp]",
    ),
    "a pinch of pepper": (
        "a dragon lay across the road and would not move",
        "blew the pepper into his nose. The dragon sneezed, and [flew "
        "backward over the hill|the sneeze carried him off like a cork]",
    ),
    "a blanket": (
        "on the bridge sat a troll who shivered and [wept icicles|froze everything he touched]",
        "laid the blanket around his "
        "shoulders, and the troll [thawed, and turned out to be rather nice|sighed and let everybody pass]",
    ),
    "a whistle": (
        "a wide river lay in the way, and there was neither boat nor bridge",
        "blew the whistle, and [seven swans came and carried {him} across|a whale came up and offered its back]",
    ),
    "a map": (
        "nine roads met there, and all of them looked the same",
        "unfolded the map. On the right road there was a small drawing of [a shoe|a smiling sun]",
    ),
    "a lump of sugar": (
        "a wild horse guarded the pass and let nobody near",
        "held out the lump of sugar on a flat hand, and the horse [ate it and bowed|carried {him} over the pass]",
    ),
    "a very long joke": (
        "a gatekeeper stood there who had been bored for three hundred years",
        "told him the very long joke, and the "
        "gatekeeper laughed [so much that he forgot to close the gate|until his helmet fell off]",
    ),
}
ARRIVALS = (
    "and then they were there. At {goal}, [on a stone|under a glass bell|in a nest of moss], lay {cure}.",
    "at last {he} stood at {goal}. There it was: {cure}, [smaller than {he} had thought|and it shone as if it had "
    "waited for {him}].",
)
KEEPERS = (
    'a {kind3} as old as the hills kept watch over it. "[What do you give me for it|Why should I give it to '
    'you]?" asked the {kind3}. "[I have nothing left|I have only my thanks]," said {hero}. "[That is the right '
    'answer|Nobody ever offered me that]," said the {kind3}. "[Take it|It was getting dusty here]."',
    '"{riddle}" asked a voice out of the [dark|wall]. {hero} thought [of {his} grandmother|for a long time]. '
    '"It is {answer}," {he} said. "[At last|Good]," said the voice, and [was quiet|a door opened].',
    "nobody guarded it. [There was only a sign that said: please bring it back|Beside it lay a note: for whoever "
    "needs it most].",
    'a {kind3} was just going to eat it. "[Stop|Wait]!" cried {hero}, and gave the {kind3} the last of the '
    '{food} instead. "[Much better|That was a good trade]," said the {kind3} with a full mouth.',
)
RETURNS = (
    "the way home is always shorter.",
    "they went home as they had come, [only faster|and everybody whom they had helped waved to them].",
    "three days later {he} was home again, [with holes in both shoes|thinner and happier].",
)
CELEBRATIONS = (
    "there was a feast that lasted [three days|until the morning], and {hero} [fell asleep in the middle of "
    "it|danced with everybody, even with the {person}].",
    'people asked {hero} how {he} had done it. "[I only stopped when somebody called|I had a lot of help]," {he} said.',
    "they wanted to build a statue of {hero}, but {he} asked for [a bench|an apple tree] instead. It is still there.",
    "{hero} hung {his} coat on its hook. [In the pocket there was still a bit of road dust|It was good to be home].",
    "and when somebody {near} needs help today, nobody [walks past|asks whose turn it is].",
)


# Without a friend, there is only one.
ALONE_WORDS = {
    "before them": "before {him}",
    "they stood": "{he} stood",
    "had they rested": "had {he} rested",
    "they were there": "{he} was there",
    "they went home as they had": "{he} went home as {he} had",
    "whom they had helped waved to them": "whom {he} had helped waved to {him}",
}


def quest(rng: random.Random, kind: str | None = None, name: str | None = None) -> str:
    """A tale in which what somebody gives at the start saves the hero near the end."""
    slots = cast(rng, kind, name)
    need, cure, relief = rng.choice(NEEDS)
    slots |= {"cure": cure}
    gifts = rng.sample(list(GIFTS), rng.choice((1, 2, 2)))
    helpers = rng.sample(HELPERS, len(gifts))
    has_friend = rng.random() < 0.55

    def tell(template: str) -> str:
        if not has_friend:
            for they, he in ALONE_WORDS.items():
                template = template.replace(they, he)
        return write(template, rng, slots)

    paragraphs = [begin(rng, slots, is_short=rng.random() < 0.5)]
    paragraphs.append(
        tell(
            f"[{{weather2}}, trouble came: {need}.|But something was wrong: {need}.|Then, {{weather2}}, bad news "
            f"came: {need}.]"
        )
    )
    paragraphs += [tell(rng.choice(ADVICE)), tell(rng.choice(DEPARTURES))]
    if has_friend:
        paragraphs.append(tell(rng.choice(TOGETHER)))
    places = rng.sample(
        ("soon", "on the second day", "behind the next hill", "at a bend of the road", "in the next village"), 2
    )
    for (helper, trouble, deed), gift, where in zip(helpers, gifts, places, strict=False):
        slots |= {"helper": "the " + helper.split(" ", 1)[1], "gift": gift.split(" ", 1)[1], "gift_a": gift}
        meeting = f"{where} {{he}} met {helper} who {trouble}. {{hero}} {deed}."
        paragraphs.append(tell(meeting) + " " + tell(rng.choice(THANKS)))
        if rng.random() < 0.6:
            paragraphs.append(tell(rng.choice(BANTER if has_friend else ALONE)))
    first = True
    for gift in rng.sample(gifts, len(gifts)):
        obstacle, solution = GIFTS[gift]
        link = "[then|and then|on the next day]" if first else "[soon after|hardly had they rested when|not much later]"
        noun = gift.split(" ", 1)[1]
        thought = (
            f'[{{hero}} thought of the {noun}|"the {noun}!" cried {{hero}}|{{hero}} was at a loss. Then {{he}} '
            f"remembered the {noun}]. "
        )
        paragraphs.append(tell(f"{link} {obstacle}. ") + tell(thought) + tell(f"{{He}} {solution}."))
        first = False
    paragraphs.append(f"{tell(rng.choice(ARRIVALS))} {tell(rng.choice(KEEPERS))}")
    paragraphs.append(f"{tell(rng.choice(RETURNS))} {tell(relief)}.")
    paragraphs.append(tell(rng.choice(CELEBRATIONS)))
    if rng.random() < 0.3:
        paragraphs[rng.randint(2, 4)] += " " + polish(tell(rng.choice(ASIDES)))
    return join(paragraphs, rng)
