"""The words of the tales: who there is, and what, and where."""

from __future__ import annotations

GIRLS = (
    "Ada Alice Anna Bella Clara Daisy Edith Ella Emma Flora Grace Hazel Ida Iris Ivy Julia Lena Lily Lucy Mabel Maria "
    "Matilda Mina Nora Olive Pearl Rosa Ruby Sophie Stella Tilly Vera Violet Willa Winnie Zoe"
).split()
BOYS = (
    "Albert Alfred Arthur Ben Bruno Caspar Charlie Daniel Edgar Emil Felix Finn Frank George Henry Hugo Jack Jasper "
    "Jonas Leo Louis Martin Max Milo Noah Oliver Oscar Otto Paul Peter Robin Samuel Simon Theo Tim Tobias Victor Walter"
).split()
CREATURES = (
    "Acorn Amber Bramble Button Clover Copper Ember Fern Ginger Juniper Marble Maple Moss Nettle Nutmeg Pebble Pepper "
    "Pip Plum Poppy Pumpkin Rusty Shadow Silver Snowflake Sparrow Thimble Thistle Toffee Tumble Velvet Whisker Willow"
).split()
PEOPLE = (
    "baker|miller|farmer|gardener|sailor|fisherman|shepherd|blacksmith|carpenter|tailor|shoemaker|clockmaker|painter|"
    "teacher|doctor|knight|musician|cook|postman|librarian|lighthouse keeper|chimney sweep|beekeeper|mapmaker|bell "
    "ringer|toymaker|ferryman|puppet maker|inventor|pirate|juggler|potter|weaver|woodcutter|astronomer"
).split("|")
ROYALS = {"she": ["girl", "princess", "queen", "witch"], "he": ["boy", "prince", "king", "wizard"]}
ANIMALS = (
    "fox rabbit bear mouse owl hedgehog frog duck cat dog wolf penguin dragon robot squirrel badger otter beaver goat "
    "sheep donkey horse pig hen goose crow sparrow swan raven snail turtle toad mole bat deer lion elephant giraffe "
    "monkey camel tiger whale seal crab ghost giant troll goblin unicorn"
).split()
TRAITS = (
    "little|old|young|small|clever|brave|kind|shy|quiet|cheerful|curious|lazy|gentle|honest|proud|lonely|patient|careful|stubborn|polite|dreamy|thoughtful|nervous|noisy|grumpy|graceful|restless|modest|friendly|merry|wise|clumsy|humble|playful|hungry|sleepy|busy|poor|forgetful|serious|generous|mysterious|famous|timid|bold|absent-minded"
).split("|")
PAIRS = (
    "wise old|brave little|kind old|shy young|clever little|curious little|lonely old|cheerful young|gentle "
    "old|stubborn old|proud young|quiet little|merry little|sleepy old|clumsy young|honest young|small but "
    "brave|poor but honest|small but clever|grumpy old|dreamy young|restless young|noisy little|thoughtful "
    "old|polite little|nervous young|strong but gentle|tiny but fearless|forgetful old|very serious young|rather "
    "lazy|extremely polite|not very brave|round and cheerful|tall and thin|wise but tired|cheerful but "
    "clumsy|young and curious|rich but unhappy"
).split("|")

# Where somebody lives, and how the place is called after that.
PLACES = {
    "a small village": "in the village",
    "a quiet valley": "in the valley",
    "a green forest": "in the forest",
    "a deep, dark forest": "in the forest",
    "an old castle": "in the castle",
    "a little town": "in the town",
    "a busy town by a river": "in the town",
    "a house by the sea": "on the coast",
    "a crooked house": "in the street",
    "a cottage by the river": "by the river",
    "a lighthouse on a rock": "on the coast",
    "a farm on a hill": "on the hill",
    "a cave in the mountains": "in the mountains",
    "a city of a thousand towers": "in the city",
    "a fishing village": "in the harbor",
    "a tall tower": "in the tower",
    "a hollow tree": "in the forest",
    "a windmill": "in the valley",
    "a small kingdom": "in the kingdom",
    "an island": "on the island",
    "a house on wheels": "on the road",
    "a garden behind a high wall": "in the garden",
    "a library": "in the library",
    "a village at the foot of a mountain": "in the village",
    "a harbor town": "in the harbor",
    "a cold country in the north": "in the north",
    "a desert town": "in the desert",
    "a market town": "in the town",
    "a cottage at the edge of the forest": "at the edge of the forest",
    "a kingdom by the sea": "in the kingdom",
}
GOALS = (
    "the wooden pier|the apple orchard|the old cemetery|the secret garden|the end of the road|the town hall|the "
    "cave behind the waterfall|the far side of the meadow|the mouth of the river|the village well|the old mill|the "
    "stone bridge|the top of the hill|the empty tower|the market square|the lighthouse|the edge of the forest|the "
    "frozen lake|the ruined castle|the railway station|the great oak|the harbor|the crossroads|the pine forest|the "
    "glass mountain|the blue lake|the old library|the witch's house|the island in the lake|the north gate|the "
    "clock tower|the black pond"
).split("|")
WEATHER = (
    "[one|early one|late one] [spring|summer|autumn|winter] [morning|evening|afternoon]",
    "[one|on a] [rainy|windy|snowy|sunny|foggy|bright|cold|warm] [day|morning|afternoon|evening]",
    "one [quiet|moonlit|starry|stormy|dark] night",
    "[one|on a] [Sunday|Monday|Tuesday|Wednesday|Thursday|Friday|Saturday] [morning|afternoon|evening]",
    "on the [first day of spring|last day of summer|longest night of the year|first day of winter]",
    "when the [first snow fell|apples were ripe|swallows came back|leaves began to fall|lilacs were in bloom]",
)
MOODS = (
    "the [sun was shining|wind was blowing|snow was falling|birds were singing|rain was falling softly|stars were "
    "bright|leaves were turning gold|moon was round and white|sky was gray|sky was clear and blue]"
)
TREASURES = (
    "golden key|silver bell|red scarf|blue lantern|wooden flute|old map|music box|painted kite|copper coin|green "
    "umbrella|glass marble|pocket watch|brass telescope|silver spoon|tin whistle|velvet hat|blue button|little "
    "violin|paper boat|wooden horse|pearl necklace|old compass|crystal ball|feather pen|leather book|woolen "
    "blanket|red balloon|iron ring|straw hat|magic lamp|painted fan|silver thimble"
).split("|")
FOODS = (
    "bread|honey|apples|cheese|soup|pancakes|cherry pie|nuts|porridge|blackberry jam|gingerbread|pears|plum "
    "cake|roasted chestnuts|cinnamon rolls|strawberries|dumplings|hot chocolate|onion soup|apple "
    "cake|biscuits|noodles|pumpkin pie|mushroom stew|lemon tart|baked potatoes"
).split("|")
WISHES = {
    "see the sea": "saw the sea",
    "learn to sing": "could sing",
    "learn to swim": "could swim",
    "learn to fly": "flew",
    "learn to dance": "could dance",
    "climb the highest mountain": "stood on the highest mountain",
    "touch the moon": "touched the moon",
    "see the snow": "saw the snow",
    "learn to read": "could read",
    "play the violin": "could play the violin",
    "sail around the world": "sailed around the world",
    "write a book": "held a finished book",
    "build a flying machine": "flew over the rooftops",
    "bake the perfect cake": "took the perfect cake out of the oven",
    "win the great race": "won the great race",
    "hear the song of the whales": "heard the song of the whales",
    "paint the wind": "painted the wind",
    "see the northern lights": "saw the northern lights",
    "talk with the trees": "understood the trees",
    "walk on a rope": "walked on a rope from roof to roof",
    "find the end of the rainbow": "stood at the end of the rainbow",
}
FEARS = {
    "the dark": "the dark is only the night resting its eyes",
    "thunder": "thunder is only the sky moving its furniture",
    "deep water": "water carries those who trust it",
    "the forest": "a forest is only many trees, and each of them is kind",
    "heights": "from above, even big worries look small",
    "strangers": "a stranger is a friend whose name I do not know yet",
    "spiders": "a spider is only a weaver with too many knees",
    "ghosts": "ghosts are only shy people who forgot to go home",
    "the wind": "the wind only wants to play",
    "the old house": "an empty house is only lonely",
}
MORALS = (
    "a kind word costs nothing and is worth a great deal",
    "who shares a little has enough",
    "patience opens many doors",
    "a friend is worth more than gold",
    "even the smallest can do great things",
    "slow and steady goes far",
    "the truth is the shortest road home",
    "nobody is too old to learn",
    "what we give away comes back to us",
    "courage is being afraid and going on",
    "a promise is a thing to keep",
    "many hands make light work",
    "the best treasures are not made of gold",
    "asking for help is no shame",
    "little by little the nest is built",
    "it is better to listen first and to speak after",
    "who laughs at others may trip over his own feet",
    "be careful what you wish for",
    "not all that glitters is gold",
    "a small seed can become a great tree",
    "joy is doubled when it is shared",
    "home is where somebody waits for you",
)
RIDDLES = (
    ("What has hands but cannot clap?", "a clock"),
    ("What gets wetter the more it dries?", "a towel"),
    ("What has a neck but no head?", "a bottle"),
    ("What goes up but never comes down?", "your age"),
    ("What has one eye but cannot see?", "a needle"),
    ("What can you catch but never throw?", "a cold"),
    ("What has teeth but cannot bite?", "a comb"),
    ("What has a bed but never sleeps?", "a river"),
    ("What has roots that nobody sees and is taller than trees?", "a mountain"),
    ("What is full of holes but still holds water?", "a sponge"),
    ("What has many keys but cannot open a door?", "a piano"),
    ("What belongs to you but is used more by others?", "your name"),
    ("What breaks when you say its name?", "silence"),
    ("What has words but never speaks?", "a book"),
    ("What can travel around the world and stay in a corner?", "a stamp"),
    ("What follows you all day and leaves you at night?", "your shadow"),
    ("What has legs but cannot walk?", "a table"),
    ("The more you take away, the larger it grows. What is it?", "a hole"),
    ("What flies without wings and cries without eyes?", "a cloud"),
    ("What runs all day and never gets tired?", "water"),
)
COLORS = "red|blue|green|yellow|white|black|brown|golden|silver|gray|purple|orange".split("|")
