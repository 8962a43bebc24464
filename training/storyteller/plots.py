"""What happens in a tale: each plot is a row of scenes, with the lessons that can be drawn from it."""

from __future__ import annotations

LOST = (
    "{hero} had a {treasure}, and {he} loved it more than anything [else|in the world]. [{weather2}, it was gone|But "
    "{weather2}, {he} could not find it|{weather2}, {he} lost it]. {he} looked [under the bed|in the kitchen|behind "
    "the door|in every pocket] and [under the table|on the roof|in the garden|down the well], but the {treasure} was "
    "not there.",
    '"[Oh no|Oh dear]!" {he} cried. "[Where is my {treasure}|Who has seen my {treasure}|What shall I do without my '
    '{treasure}]?" So {he} [put on {his} coat|took some {food}|closed the door] and [went to look for it|walked to '
    "{goal}].",
    "{meeting}",
    '{question} "I have lost my {treasure}," said {hero}. "Have you seen it?"',
    '"[No|I am sorry, no]," said {friend}, "but [I will help you|two can look better than one|let us look '
    'together]." [They looked|They walked and looked] [all day|until the sun went down|everywhere].',
    "[At last|In the end|Then], at {goal2}, [{friend} saw something shine in the grass|they heard a small sound|they "
    'met a {kind3} who was holding the {treasure}]. "[There it is|Look|Here it is]!" [cried|shouted|called] '
    "{friend}. It was the {treasure}!",
    '{hero} was so happy that {he} [danced|jumped for joy|laughed and cried at the same time]. "Thank you, '
    '{friend}," {he} said. "[Come home with me and eat some {food}|I could not have found it without you|You are a '
    'true friend]."',
)
WISH = (
    "more than anything, {hero} wanted to {wish}. [But nobody would help {him}|But {he} did not know how|Everybody "
    'laughed at {him}]. "[You cannot do that|That is not for you|You are too small for that]," [they '
    "said|said the neighbors].",
    "{weather2}, {hero} [made up {his} mind|decided to try|could wait no longer]. {he} packed some {food} and a "
    "{treasure}, and {he} [set out|left home|began to walk].",
    "{meeting}",
    '{question} "I want to {wish}," said {hero}, "but [I do not know how|everybody says that I cannot|it is so hard]."',
    '"[Then you have come to the right place|I can show you the way|Let me help you]," said {friend}. "But [you must '
    'be patient|you must try every day|it will take time]. {moral2}."',
    "so {hero} tried. The first time {he} [failed|fell down|made a mistake]. The second time {he} [failed "
    "again|almost cried|did a little better]. But {he} did not give up[, and {friend} stayed with {him}||, for {he} "
    "was brave].",
    "[At last|After many days|On the seventh day|When spring came], {hero} {wished}. {He} had never been so "
    '[happy|proud]. "[I did it|Now I know that I can|Look at me]!" {he} [cried|shouted|said].',
)
RESCUE = (
    "{weather2}, {hero} heard a cry for help near {goal}. {he} [ran|hurried] there as fast as {he} could.",
    "a {trait2} {kind2} had [fallen into the river|fallen into a deep hole|been caught in a storm|lost the way in "
    "the snow]. It was {friend}.",
    '"[Help|Please help me]!" cried {friend}. "[I cannot hold on much longer|I am so cold|I cannot get out]!"',
    '"[Do not be afraid|Hold on]," [called|said] {hero}. "[I am coming|I have an idea|I will not leave you]." {he} '
    "[took|ran home and fetched] a [long rope|strong branch|ladder] and [threw|pushed] it to {friend}.",
    "{hero} pulled [and pulled|with all {his} strength|as hard as {he} could], and at last {friend} was safe.",
    '"You saved my life," said {friend}. "[How can I thank you|What can I give you]?" "[A friend needs no '
    'reward|Just come and eat some {food} with me|You would have done the same]," said {hero}.',
    "[But the next day|A week later], {friend} [brought|gave] {hero} a {treasure}. [It was the finest gift that {he} "
    "had ever seen|{Hero} kept it for the rest of {his} life|{Hero} did not know what to say].",
)
QUARREL = (
    "{his} best friend was a {trait2} {kind2} named {friend}. They [did everything together|played together every "
    "day|shared everything they had].",
    'but {weather2}, they [found|saw] a {treasure} at {goal}. "[It is mine|I saw it first|It belongs to me]!" said '
    '{hero}. "No, [it is mine|I saw it first|it belongs to me]!" said {friend}. They [shouted|argued] until [it was '
    "dark|they were both tired|the birds flew away], and each went home [alone|angry|without a word].",
    "{hero} [sat in {his} room|lay in bed|looked out of the window] and felt [sad|lonely|sorry]. The {treasure} was "
    "[beautiful|bright], but [what was it worth without a friend|it could not talk or laugh|it was no fun to be "
    "alone].",
    '[The next morning|Three days later], {hero} went to {friend}. "I am sorry," {he} said. "[You can have the '
    '{treasure}|You are more important than a {treasure}|I was wrong]."',
    '"I am sorry too," said {friend}. "[Let us share it|We can both have it|You keep it one day, and I keep it the '
    'next]."',
    "so they shared the {treasure}, and [they never quarreled again|it made them twice as happy|it shone brighter "
    "than before].",
)
STRANGER = (
    "{hero} was [not rich|poor], but {he} had [a warm fire|a dry roof] and some {food}.",
    "{weather2}, there was a knock at the door. Outside stood [an old woman|an old man|a stranger] in a "
    '[gray|torn|wet] coat. "[May I come in|I am cold and hungry|Have you something to eat]?" asked the stranger.',
    '"[Of course|Come in|You are welcome]," said {hero}. "[I have only some {food}, but half is yours|Sit down by '
    'the fire|There is always room for one more]."',
    "the stranger ate, and slept by the fire. In the morning, the stranger [was gone|smiled and said goodbye]. But "
    "on the table lay a {treasure}.",
    "it was no common {treasure}. Whenever {hero} [touched|held] it, [there was {food} on the table|the room was "
    "warm and bright|all {his} worries went away]. {he} [shared this luck with everybody {near}|gave some of it to "
    "every neighbor|never used it for {himself} alone].",
    'a {trait2} {kind2} named {friend}, who lived nearby, [asked for the secret|wanted to know why]. "[There is no '
    'secret|It is simple]," said {hero}. "{moral2}."',
)
RIDDLE = (
    "{weather2}, {hero} wanted to cross the bridge [to visit {his} mother|to go to the market|to see the world]. But "
    "on the bridge sat a {trait2} {kind2} named {friend}.",
    '"[Stop|Wait]!" said {friend}. "Nobody may cross my bridge without an answer to my riddle. {riddle}"',
    "{hero} [sat down and thought|thought for a long time|scratched {his} head]. {he} [looked at the water|looked at "
    "the sky|ate some {food}] and thought again.",
    '"[I know|I have it]!" {he} said at last. "It is {answer}."',
    '"[That is right|Correct|You are clever]," said {friend} [with a smile|and laughed|in surprise]. "Nobody has '
    "known the answer for a hundred years. You may cross, and [take this {treasure} with you|I will come with "
    'you|you may come back as often as you like]."',
    "so {hero} crossed the bridge, [and the sun was shining on the other side|with a light heart|and {friend} waved "
    "for a long time].",
)
FEAR = (
    "there was only one thing that {hero} was afraid of: {fear}. [{He} told nobody about it|When {he} thought of it, "
    "{his} knees began to shake|{He} would rather stay at home all day].",
    "{weather2}, {his} friend {friend}, a {trait2} {kind2}, [was late|did not come home]. {hero} waited and waited. "
    '"[Somebody must go and look|I must go out and find {friend}]," {he} said, [and {his} heart beat fast|in a small '
    "voice].",
    "{he} took {his} {treasure} and went out, step by step, to {goal}. {he} thought of {fear}, [but {he} did not "
    "turn back|and {he} shook like a leaf|but {he} thought of {friend} even more].",
    'there sat {friend} with a hurt foot. "You came!" said {friend}. "But [you are afraid|I thought that you were '
    'afraid] of {fear}."',
    '"[I am|I was]," said {hero}. "But I was [more|much more] afraid for you. And [now I know something|on the way I '
    'learned something]: {comfort}."',
    "they went home together, slowly, and {hero} was not afraid any more.",
)
TRADE = (
    "{hero} had nothing but a {treasure}. One morning {he} took it to the market. There {he} met a {trait2} {kind2} "
    "named {friend}.",
    '"[What a fine {treasure}|I have always wanted a {treasure}]!" said {friend}. "I will give you {food} for it." '
    '"[Very well|Why not]," said {hero}, and they shook hands.',
    "a little later {he} met a {kind3} who was very hungry. {hero} gave the {food} away and got a {treasure2} in "
    "return.",
    "then it began to rain, and {he} met a child who was crying. {hero} gave the {treasure2} to the child and got [a "
    "song|a smile|a kiss] for it.",
    '"You have made a bad bargain," said {friend}. "[You had a {treasure}, and now you have nothing|Your pockets are '
    'empty]."',
    '"[Not at all|Oh no]," said {hero}. "This morning I had a {treasure}. Now I have [two friends|three friends] and '
    'a [light heart|song]. {moral2}."',
)
GREED = (
    '{hero} had a great store of {food}, but {he} never gave any of it away. "[It is all mine|What I have, I keep]," '
    "{he} [always said|said].",
    '{weather2}, a {trait2} {kind2} named {friend} came to the door. "[I am so hungry|The winter is hard]. Could you '
    'give me some {food}?"',
    '"[No|Certainly not]," said {hero}. "[Find your own|I need it all myself|Go away]." And {he} shut the door.',
    "that night [a storm came|the river rose|the roof fell in], and in the morning nothing was left of all the "
    "{food}. {hero} sat down and [wept|cried].",
    'then {friend} came back. "I have only some {food}," said {friend}, "but [half is yours|we can share it|it is '
    'enough for two]."',
    '{hero} was ashamed. "[I was unkind to you|I gave you nothing], and you [share with me|are good to me]," {he} '
    'said. "[I will never be greedy again|From now on, what is mine is yours]."',
)
FEAST = (
    'it was almost the birthday of {his} friend {friend}, a {trait2} {kind2}. "There shall be {food}," thought '
    '{hero}, "and [everybody shall come|it will be a surprise]."',
    'but when {he} looked into the kitchen, [the cupboard was empty|there was no flour|there was no sugar]. "[What '
    'shall I do|How can I cook now]?" {he} said.',
    "{he} asked [the {kind3}|the {kind3} next door], who brought [a bag of flour|six eggs|a jar of honey]. {he} "
    "asked the [farmer|miller], who brought [milk|butter|salt]. Soon the whole kitchen was full of friends.",
    "they [mixed|stirred] and [baked|cooked] and [sang|laughed], and [in the evening|at noon] the table was full of "
    "{food}.",
    'then {friend} came in. "[Surprise|Happy birthday]!" they all [shouted|cried]. {friend} [blushed|was '
    'speechless|began to laugh]. "[Is all this for me|You did all this for me]?" "[Of course it is|For you alone]," '
    "said {hero}.",
    'it was the best feast {near} in a hundred years. "{moral2}," said {friend}, [with a full mouth|and took another '
    "bite].",
)
DRAGON = (
    "{weather2}, bad news came: [the well had run dry|a great fire was burning in the hills|the bridge had been "
    "washed away|the king had lost his crown|the winter would not end].",
    '"Who can help us?" the people asked. [A knight tried, but he came back with a broken sword|A rich man tried, '
    'but gold was of no use|A wizard tried, but he had forgotten the right words]. "[Let me try|I will go]," said '
    "{hero}. Everybody [laughed|was silent].",
    "{hero} walked [all day and all night|for three days] to {goal}. {meeting}",
    '{question} "[My people need help|I want to help my people]," said {hero}, and told [everything|the whole story].',
    '"You are the first who [asked politely|came without a sword|said good morning to me]," said {friend}. "[Take '
    'this {treasure}|Here is a {treasure}]. [It will help you|When you need it most, hold it up]."',
    "{hero} thanked {friend} and hurried home. {he} held up the {treasure}, and [at once|slowly, very slowly] "
    "everything was good again.",
    "the people [cheered|danced in the streets|rang all the bells]. They wanted to make {hero} [their king|rich], "
    "but {he} only asked for [some {food}|a quiet evening|a day of rest].",
)
RACE = (
    "{his} neighbor was {friend}, a {trait2} {kind2}, who [boasted all day long|was the fastest of all|never stopped "
    'talking about it]. "[Nobody is as fast as I am|I can run faster than the wind]," said {friend}. "[Shall we '
    'race|Do you dare to race against me], {hero}?"',
    '"[Very well|Why not]," said {hero}. "[Tomorrow at sunrise|On Sunday], from here to {goal}." Everybody {near} '
    "came to watch.",
    'the {kind3} gave the signal, and off they went. {friend} was soon [far ahead|out of sight]. "[There is plenty '
    'of time|I can take a nap]," thought {friend}, and [lay down under a tree|stopped to eat some {food}|sat down to '
    "rest].",
    "{hero} did not stop. Step by step {he} went on, [over the hill|through the mud|across the stream], [and {he} "
    "did not look back|humming a little song|breathing hard].",
    "when {friend} [woke up|looked up], {hero} was already at {goal}. The crowd [cheered|clapped and shouted], and "
    "{hero} got a {treasure} as a prize.",
    '"[I have learned something today|You have won]," said {friend} quietly. "[Will you teach me how to be '
    'patient|Will you run with me tomorrow]?" "[Gladly|Of course]," said {hero}.',
)
SEED = (
    '{weather2}, {friend}, a {trait2} {kind2}, gave {hero} a [small brown|strange|tiny black] seed. "[Plant it and '
    'wait|Take good care of it]," said {friend}. "[It is more than it seems|There is a secret inside]."',
    "{hero} planted it [behind the house|near {goal}|in a pot of clay] and gave it water every day. A week went by, "
    'and nothing happened. A month went by, and nothing happened. "[It is only a stone|You are wasting your time]," '
    "said the {kind3} next door.",
    "but {hero} [went on|did not give up|sang to it every evening]. {he} kept the snow away in winter and the weeds "
    "in spring.",
    "then, one morning, there was a green leaf. It grew [higher than the house|up to the clouds|into a tall tree], "
    "and on it hung [golden pears|flowers of every color|little silver bells].",
    'all the neighbors came to see it. "[How did you do it|What is your secret]?" asked the {kind3}. "[I only '
    'waited|Water and patience]," said {hero}. "{moral2}."',
    "{hero} gave [a seed|three seeds] to everybody who asked, and soon {friend} saw such trees wherever the wind blew.",
)
MYSTERY = (
    '{weather2}, something strange happened {near}: somebody had eaten all the {food}. "[A thief|Somebody was here '
    'in the night]!" cried {friend}, a {trait2} {kind2}. "[Let us find the thief|We must find out who it was]."',
    "{hero} took {his} {treasure} and [looked at the floor|began to search]. There were [small "
    "footprints|crumbs|drops of milk], and they led [out of the window|down the stairs|through the garden] to {goal}.",
    '"[Be quiet|Follow me]," whispered {hero}. {friend} came behind {him}, [shaking a little|on tiptoe]. [They heard '
    "a noise|Something moved in the dark].",
    'there, behind a [stone|barrel|curtain], sat a very small {kind3} with round eyes. "[Please do not be angry|I am '
    'sorry]," it said. "[My children were hungry|I have not eaten for three days|I did not know that it was yours]."',
    '{friend} wanted to shout, but {hero} shook {his} head. "[You only had to ask|Come, there is more in the '
    'cellar]," said {hero}. "[Nobody here shall be hungry|Next time, knock at the door]."',
    "so the mystery was solved. And from then on, there was always an extra plate on the table for the {kind3}.",
)
THREE_WISHES = (
    '{weather2}, {hero} [caught a golden fish|freed a bird from a net|found an old lamp] at {goal}. "[Thank you|You '
    'have saved me]," said a voice. "I will give you three wishes."',
    '{hero} ran home and told {his} friend {friend}, a {trait2} {kind2}. "[Wish for gold|Wish for a castle]!" said '
    '{friend}. "[Wait|Let me think]," said {hero}. "[I am so hungry|I wish I had some {food}]." At once the table '
    "was full of {food}.",
    '"[You fool|What a waste]!" cried {friend}. "[I wish the {food} would stick to your nose|I wish you had a '
    'tail]!" And it happened at once, for wishes do not ask who makes them.',
    "{hero} looked into the mirror. {friend} looked at {hero}. Then they both began to laugh, [until they had to "
    "hold on to the table|and they could not stop].",
    'there was one wish left. "I wish that [everything were as it was before|we were as we were this morning]," said '
    "{hero}, and so it was.",
    '"[No gold and no castle|All three are gone]," said {friend}. "But [we have laughed|we are still friends]," said '
    '{hero}. "{moral2}."',
)
VOYAGE = (
    "{weather2}, {hero} found an old map [in a bottle|under the floor|inside a book]. A red cross marked {goal}, far "
    "across the water. {he} showed it to {friend}, a {trait2} {kind2}.",
    '"[Let us go|What are we waiting for]," said {friend}, and they [built a raft|borrowed a boat]. They took [a '
    "barrel of water|two blankets], some {food} and a {treasure}.",
    "on the third day a storm came. The waves were as high as [houses|towers], and the wind [tore the sail|broke the "
    'mast]. "[Hold on to me|Do not let go]," shouted {hero}. All night long they [fought the sea|held each other\'s '
    "hands].",
    "in the morning the sea was as smooth as glass, and before them lay {goal}. They dug [until noon|for hours] and "
    "found [an iron box|a wooden chest]. Inside was [only a letter|nothing but a small mirror].",
    '[Somebody had written on it|On it was written]: "{moral2}." {friend} [sighed|frowned]. "[Is that all|No gold]?" '
    'But {hero} [laughed|smiled]. "[We have crossed the sea together|We have a story to tell]," {he} said.',
    "they sailed home [under a sky full of stars|with the wind behind them], and everybody {near} wanted to hear the "
    "story.",
)
VOICE = (
    "{hero} had the [finest|loudest|sweetest] voice {near}. Every evening {he} sang, and [the birds fell silent to "
    "listen|people opened their windows]. But {weather2}, {his} voice was gone. {he} opened {his} mouth, and there "
    "was not a sound.",
    "{he} went to {friend}, a {trait2} {kind2} who knew about such things. {friend} looked into {his} mouth and "
    'said: "[You have given your voice to everybody|You have sung so much for others], and kept nothing for '
    'yourself. [You must rest|Be silent for seven days]."',
    "so {hero} was silent. {he} heard [the rain on the roof|the bees in the grass|the wind in the chimney]. {he} "
    "heard [a child laugh|the {kind3} snore|the river far away]. {he} had never noticed how many songs there were.",
    "on the seventh day, {he} opened {his} mouth, and a new song came out. It was [softer|slower] than before, and "
    "[the rain was in it, and the bees, and the wind|everything that {he} had heard was in it].",
    '"[That was the most beautiful song of all|Now I understand]," said {friend}, and wiped away a tear. "{moral2}," '
    "said {hero}.",
)
NEIGHBOR = (
    '{weather2}, somebody moved into the empty house next door. It was {friend}, a {trait2} {kind2}. "[I do not like '
    'new neighbors|A {kind2} is always trouble]," thought {hero}, and [closed the curtains|shut the gate].',
    "{friend} [waved over the fence|said good morning]. {hero} [looked away|did not answer]. {friend} [left some "
    "{food} at the door|swept the snow from both doors]. {hero} [said nothing|shook {his} head].",
    "then {hero} [fell ill|caught a bad cold]. {he} lay in bed, [hot and thirsty|cold and alone], and nobody came. "
    'At last there was a knock. "[I have not seen your light|You did not shut the gate today]," said {friend}. "[I '
    'brought you soup|May I light the fire]?"',
    "{friend} stayed [three days and three nights|until the fever was gone]. They talked about [the sea|their "
    "mothers|the stars], and {hero} [laughed for the first time in years|forgot to be angry].",
    '"[I have been a fool|Forgive me]," said {hero}. "[I did not even ask your name|I was rude to you]." "[It does '
    'not matter|That was yesterday]," said {friend}. "[Eat your soup|Today is another day]."',
    "the next summer they took down the fence between their gardens, and [nobody remembered who had the idea|the "
    "{kind3} planted beans where it had been].",
)
CLOCK = (
    "in the tower {near} there was a great clock. {weather2}, it stopped. [Nobody knew when to get up|The school did "
    "not begin, and the shops did not close|The roosters did not know when to crow].",
    "the mayor offered a {treasure} to anybody who could repair it. {friend}, a {trait2} {kind2}, hit it with a "
    "hammer. [A rich merchant shouted at it|A doctor gave it some medicine]. Nothing helped.",
    '"[May I have a look|Let me listen to it first]," said {hero}. People laughed, but {hero} climbed [three hundred '
    "steps|the dark stairs] and put {his} ear to the clock.",
    "deep inside, between two wheels, a [sparrow|swallow|mouse] had built a nest, and in it slept three tiny young "
    'ones. "[So that is it|I see]," whispered {hero}.',
    '{he} came down and said: "The clock will go again in four weeks. [Until then, we must live without it|It only '
    'needs some rest]." {friend} [wanted to argue|laughed out loud], but {hero} told everybody the reason.',
    "so for four weeks nobody {near} was in a hurry. People [ate when they were hungry and slept when they were "
    "tired|had time to talk to each other]. And when the clock struck again, many of them were almost sorry.",
)

LETTER = (
    "{weather2}, {hero} found a letter on the road. [The rain had washed the name away|There was no name on it, only a "
    'drawing of a little {color} house]. Inside it said: "[I am sorry|Please come back|I still think of you]. [The '
    'kettle is on|Your chair is still by the window|The door is never locked]."',
    '"[Somebody is waiting for this|A letter like this must not get lost]," said {hero}, and {he} went from door to '
    "door with it. [The {person} shook his head|The {person} had never seen it]. [The {person2} only wanted to talk "
    "about the weather|The {person2} said that it was much too sad to be for him].",
    "at the last house, near {goal}, lived {friend}, a {trait2} {kind2} whom nobody ever visited. {friend} read the "
    "letter once, and then again, and [sat down on the doorstep|did not say a word for a long time].",
    '"It is from my [brother|sister|oldest friend]," said {friend} at last. "[We quarreled over a {treasure}, '
    "many years ago|I do not even remember what we quarreled about]. [I thought that the letter would never come|I "
    'was too proud to write first]."',
    '"[The road is dry again|The evening train leaves at six]," said {hero}. "[I could carry your bag|I could '
    'come with you as far as {goal2}]."',
    "so {friend} [put on a clean shirt|found a hat], and {hero} carried the bag. [A week later another letter "
    "came, and this one had a name on it: {hero}|They did not talk much on the way, but it was a good silence].",
)
SHADOW = (
    "one [sunny|bright] [morning|afternoon], {hero} noticed that {his} shadow was gone. {he} looked [behind "
    "{him}|under {his} feet|on the wall], but there was [nothing|only sunlight].",
    '"[You should take better care of your things|Shadows do not simply walk away]," said {friend}, a {trait2} '
    '{kind2}. "[When did you see it last|Were you unkind to it]?" {hero} thought about it. "[I never once said '
    'thank you to it|I always walked in front]," {he} said.',
    "they found the shadow at {goal}. It was [dancing by itself|lying in the grass, looking at the clouds|trying "
    "on the hats of other shadows], and it looked [very happy|happier than {hero} had felt for a long time].",
    '"[Please come home|I miss you]," said {hero}. "I will come," said the shadow, "[if you dance with me '
    "once a day|if I may lead on Sundays|if you stop in the sun now and then]. [You are always in such a hurry|I "
    'am tired of running behind you]."',
    '"[That is fair|I promise]," said {hero}. {friend} played a tune on a [comb|blade of grass|bottle], and {hero} '
    "and {his} shadow danced until [the sun went down|they were both out of breath].",
    "since then {hero} [walks a little more slowly|takes a rest whenever the sun shines]. And in the evening, when the "
    "shadow grows long, it [is always the first one at the door|bows politely before it goes to sleep].",
)
MOON = (
    '{weather2}, {hero} looked into [the black pond|the well|the village pond] and cried out. "[The moon has '
    'fallen into the water|The moon is drowning]!"',
    '{he} ran to {friend}, a {trait2} {kind2}, and [pulled {friend} out of bed|knocked at the window]. "[Bring a '
    'bucket|Bring a net|Bring the longest ladder you have]," said {hero}. "[There is no time to explain|We must '
    'save the moon]."',
    "they [fished with a net|threw out a rope with a hook|scooped and scooped with a soup spoon]. Each time they "
    "almost had it, the moon [broke into a hundred pieces|slipped away], and each time it [came together "
    "again|swam back to the middle].",
    "at last {friend} pulled so hard that {he2} fell on {his2} back in the mud. And there, [high above the "
    'trees|over the roofs], was the moon, [round and bright|as calm as ever]. "[We did it|We have saved it]!" '
    'cried {friend}. "[It flew right over my head|It did not even get wet]."',
    "{hero} looked at the water, and at the sky, and at the water again. {he} [understood, and said nothing|was "
    'about to say something]. {friend} looked so [proud|happy], with mud on {his2} nose. "[Well done|It was '
    'mostly you]," said {hero}.',
    "on clear nights they still [check that the moon is in its place|keep the bucket by the door]. [So far it has not "
    "fallen again|One never knows].",
)
SHOP = (
    "{hero} had a small shop {near}, and in it {he} sold lost things: [lost gloves|lost buttons], [lost umbrellas|lost "
    "keys], and on a high shelf, in jars, [lost afternoons|words that people had forgotten].",
    '{weather2}, a {trait2} {kind2} came in and shook the rain from {his2} coat. "My name is {friend}," {he2} '
    'said. "I have lost something, but [I no longer know what it was|I cannot describe it]. [It was small and '
    'warm|I only notice it at night]."',
    '"[Let us see|Take your time]," said {hero}. They tried [a {treasure}|a single red glove]. They tried [a '
    "piece of a song|the smell of {food}]. They opened drawer after drawer. {friend} shook {his2} head [each "
    "time|and sighed].",
    "it grew dark. {hero} [put the kettle on|lit the lamp], and they sat among the boxes and talked. {friend} told "
    "{him} about [the sea|the house where {he2} was born|a summer long ago], and suddenly {he2} began to laugh.",
    '"[There it is|That was it]!" said {friend}. "[My laugh|I had lost my laugh], and [it was here all the '
    'time|I have not heard it for years]! What do I owe you?" "[Nothing|A cup of tea]," said {hero}. "[It was '
    'never mine to sell|Come and use it here now and then]."',
    "{friend} came back [the next day|every Thursday]. Soon there was a second chair in the shop, and [nobody ever "
    "bought it|a sign on it that said: not for sale].",
)
STAR = (
    "{weather2}, something fell into the garden of {hero} with a sound like [a small bell|breaking glass]. It was "
    "a star, no bigger than [an apple|a thimble], and it was crying.",
    '"I leaned out too far," said the star. "[My mother will be worried|I only wanted to see what a {animal} looks '
    'like]. [How do I get back|Can you throw me]?" {hero} threw as high as {he} could, but the star [only reached the '
    "chimney|came down in the cabbages].",
    '{friend}, a {trait2} {kind2} who [knew about such things|had read many books], came to help. "[We need '
    'something that flies|Stars are light when they are happy]," said {friend}. "[Has anybody a kite|Do you know '
    'a joke]?"',
    "they tied the star to [a kite|a {color} kite] with [a ribbon|a piece of wool], and they ran down the hill "
    "with it. {hero} ran, {friend} ran, and [the {kind3} from next door ran, too|half the neighbors ran behind "
    "them].",
    "up went the kite, over [the roofs|the trees], over the clouds, until the string was [as thin as a hair|at its "
    "end]. Then there was a [tiny|bright] spark, and the string came down [slowly|in soft loops] over the garden.",
    "now, on clear evenings, one star [winks twice|shines a little lower than the others]. {hero} always [waves "
    "back|says good night to it].",
)
DOOR = (
    "{weather2}, a door stood in the middle of [the meadow|the road|the field]. It was {color}, and there was no "
    "house around it. {hero} walked around it [once|three times]. Then {he} [knocked|turned the handle].",
    "on the other side lay the same country, but everything was [the wrong way around|different]. [The rivers ran "
    "uphill|It snowed in July]. [The children taught the teachers|The dogs threw sticks for their owners]. And "
    "there stood {friend}, a {trait2} {kind2}, who [walked backward|wore {his2} shoes on {his2} hands].",
    '"[Goodbye|Good night]," said {friend}, which there means hello. "[You look terribly right|You come from the other '
    'side, I see]. [Would you like some {food} before you are hungry|Shall I forget you now, or later]?"',
    "they [spent the whole day together|had a very long afternoon]. {friend} showed {hero} [the lake where the "
    "fish feed the fishermen|the school where everybody gets full marks for mistakes], and {hero} [laughed until "
    "{his} sides hurt|had never learned so much].",
    '"I must go home," said {hero}, [when the sun rose in the west|when the stars went out, for that is evening '
    'there]. "[Will you visit me|Come with me]?" "[I would fall off|Somebody must keep the rivers running '
    'up]," said {friend}. "But take this {treasure}, [so that you know it was true|and think of me when '
    'something goes wrong]."',
    "the next morning the door was gone. But the {treasure} [always pointed the wrong way|ticked backward|was warm "
    "when it should have been cold], and whenever something went wrong, {hero} [smiled|said good night to it].",
)
GHOST = (
    "every night, at [midnight|one o'clock], there was a terrible noise {near}. \"[It is a ghost|It is the ghost "
    'of the old mill]," said the {person}. "[It howls like a hundred cats|It is looking for its head]," said '
    "the {person2}. Nobody went out after dark.",
    "{hero} could not sleep. {weather2}, {he} [took a candle|took {his} {treasure}] and followed the sound. {his} "
    "heart beat [like a drum|up to {his} ears], but {his} feet went on, [past the last house|over the bridge], as "
    "far as {goal}.",
    "there, in the moonlight, sat a {trait2} {kind2} with [a violin|a trumpet|a very old trombone]. The {kind2} "
    '[jumped up|turned red]. "[Did I wake you|Was it very bad]?" The name of the {kind2} was {friend}.',
    '"It was [a little loud|quite terrible]," said {hero}, who never lied. "[Why do you play at night|Why do '
    'you play out here]?" "[Because nobody is listening|Because they laughed at me]," said {friend}. "[I am '
    'still learning|I only know one song]."',
    '"[Then play it to me|Let me hear it from the beginning]," said {hero}, and sat down in the grass. {friend} '
    "played. It was terrible, but [in the middle|near the end] there were [three notes|four notes] that were "
    '[right|beautiful]. "[Play those again|Start with those]," said {hero}.',
    "they met every evening, and by [spring|Christmas] there were more right notes than wrong ones. The people "
    '{near} still talk about the ghost. "[It must have moved away|It plays much better now]," they say.',
)
COLORS_PLOT = (
    "everything {near} was gray: the houses were gray, the hats were gray, and on Sundays there was gray soup. "
    "{hero} did not mind, for {he} [had never seen anything else|thought that it had to be so].",
    "{weather2}, {friend} came, a {trait2} {kind2} with a [cart full of paint|box of paint under {his2} arm]. "
    '"[What happened here|Who washed this place too hot]?" asked {friend}. "[Nothing ever happens here|It has '
    'always been so]," said {hero}.',
    "that night they painted [one door|a single window], only one, and it was {color}. In the morning a crowd "
    'stood before it. "[Scandalous|What will the mayor say]," said the {person}. "[It hurts my eyes|It is '
    'rather loud]," said the {person2}. But [nobody went away|a child began to laugh].',
    'the next night the {person2} came with a ladder. "[Only my door|Just the fence]," he whispered, '
    '"[something with yellow|and please tell nobody]." The night after that there were twelve, and [by the end '
    "of the week|before the moon was full] they had run out of brushes.",
    'even the mayor came. "[There is a law against this|I ought to be angry]," he said, and looked at the [red '
    'roofs|orange chimneys]. He looked for a long time. "[Could you do my hat|Have you any blue left]?" he asked.',
    "{friend} moved on, to the next gray place. But {hero} kept [one gray stone|one gray wall] in the garden, [to "
    "remember|so that the colors had something to lean on].",
)
GIANT = (
    "behind the hill lived a giant, and the giant had a cold. Whenever he sneezed, [the roofs flew off|the washing "
    'flew into the next country|all the hats {near} were gone]. "[We must drive him away|We need soldiers]," '
    "said the {person}.",
    '"[Has anybody asked him how he feels|What he needs is a handkerchief]," said {hero}. Everybody laughed, '
    "except {friend}, a {trait2} {kind2}, who could sew.",
    "so they collected [sheets and curtains and tablecloths|all the bed sheets {near}], and {friend} sewed for "
    "three days and three nights. {hero} cooked [onion soup|honey tea] in [every pot they had|a bathtub]. Then "
    "they [pulled it all up the hill|went to see the giant].",
    'the giant lay behind the hill with a red nose. "[Go away|Do not look at me]," he said in a small voice, '
    'small for a giant. "[I break everything|I am sorry about the roofs]." "[Good health|Bless you]," said '
    "{hero}, and gave him the handkerchief.",
    "the giant [blew his nose, and it rained fish as far away as the coast|drank the soup in one gulp and cried a "
    'little]. "[Nobody has ever brought me soup|Nobody ever comes up here]," he said. {friend} patted his thumb.',
    "now the giant [holds the ladder when somebody mends a roof|carries the children to school in his hat|turns "
    "the mill when there is no wind]. And in winter he wears a scarf that is [a mile long|made of forty blankets].",
)
CONTEST = (
    "{weather2}, there was a great baking contest {near}. The prize was a {treasure}. {hero} wanted to win it with "
    "{food}, as {his} grandmother had made it.",
    '{his} rival was {friend}, a {trait2} {kind2}, who had won [nine years in a row|every year]. "[You need not even '
    'try|May the best one win, and that is me]," said {friend}, and tied {his2} apron.',
    "{hero} mixed and stirred. But the labels had fallen off the jars, and instead of sugar {he} took "
    "[salt|pepper|mustard]. {he} only noticed it [when it was in the oven|when it was too late].",
    "then there was a crash. {friend} had slipped, and {his2} cake lay on the floor, [with a shoe in it|and the "
    "cat was already eating it]. {friend} [sat down beside it|hid {his2} face in the apron]. {he2} was not proud "
    "any more.",
    '"[Half of mine is yours|We can still put yours and mine together]," said {hero}. "[But I must warn you|It '
    'is not quite right, either]." They [put the sweet crumbs on the salty cake|covered everything with cream] '
    "and carried it in together.",
    'the judges tasted it. They looked at each other. They tasted it again. "[Strange|Extraordinary]," they '
    'said, "[sweet and salty at the same time|we have never eaten anything like it]." {hero} and {friend} won, '
    "and the recipe is [secret to this day|still called the Accident].",
)
WINTER = (
    "the best friend of {hero} was {friend}, a {trait2} {kind2}. But every year, when the first snow fell, "
    '{friend} went to sleep, and only woke up in spring. "[I have never seen winter|What is winter like]?" '
    "{friend} always asked.",
    '{hero} tried to explain. "[It is white and quiet|It is like a page that nobody has written on]," {he} said. '
    'But {friend} could not imagine it. "[You would have to show me|I wish that I could see it]," said {friend}, '
    "and yawned, and fell asleep.",
    "so that winter {hero} collected everything. {he} drew [the frost flowers on the window|the tracks of the "
    "birds]. {he} wrote down [the sound of boots in the snow|the names of the winds]. And in [the cellar|a deep "
    "hole], wrapped in straw, {he} kept [a snowball|a very small snowman].",
    "when spring came, {friend} [stretched|opened one eye]. {hero} was already sitting by the bed with [a basket|a "
    'box full of paper]. "[Here it is|I have brought you the winter]," said {hero}.',
    "{friend} looked at every drawing [twice|for a long time]. Then {he2} held the snowball in {his2} paws until "
    'it was gone. "[So that is winter|It is colder than I thought]," said {friend}, "[and more beautiful|and it '
    'smells of nothing, like sleep]."',
    '"And what did you dream?" asked {hero}. "[Of you|I dreamed that you were out in something white]," said '
    '{friend}. "[Now I know what it was|I wondered what it was called]."',
)
TREE = (
    "in the middle of the square stood an old [chestnut|oak|linden] tree. {hero} had [learned to climb in it|read "
    'every one of {his} books under it]. {weather2}, the mayor said: "[The tree must go|We need room for my '
    'statue]."',
    "{hero} [asked politely, and nobody listened|wrote a letter, and got no answer]. So {he} took [a blanket and "
    'some {food}|a pillow, a book and a {treasure}] and climbed into the tree. "[I live here now|Good morning]," '
    "{he} said to the men with the saws.",
    'they waited [one day|three days]. It rained. {friend}, a {trait2} {kind2}, came by. "[Is there room for '
    'two|How is the weather up there]?" {he2} called, and climbed up, too. Then came the {person}, and the '
    "{person2}, and [the whole school|the {kind3} with all her children].",
    "up there they [told stories|played cards|sang in the evenings], and it was [much nicer than down below|more "
    "fun than any feast]. People who had not spoken to each other for years [shared a branch|shared their {food}].",
    'on the [fifth|seventh] evening the mayor stood under the tree, all alone. "[It is very quiet in the town '
    'hall|I can hear you laugh as far as my bedroom]," he said. "[Is there a branch for me|Could somebody let '
    'down the rope]?"',
    "the statue was never built. But on the lowest branch there is [a small brass sign|a bench now], and on it is "
    "written: [room for everybody|please climb].",
)
LAUGH = (
    "the king had forgotten how to laugh. [Jugglers came, and he yawned|Clowns came, and he sent them away]. "
    '"Whoever makes me laugh," said the king, "shall have [half my kingdom|a chest of gold]. [Whoever fails '
    'must sweep the palace|Whoever bores me must count the peas in the kitchen]."',
    "{hero} [knew no jokes|was no clown], but {he} had a friend, {friend}, a {trait2} {kind2}, who [had to count "
    'peas in the royal kitchen|was sweeping there already]. "[I must get {him2} out|I will go to the palace]," '
    "said {hero}.",
    "{he} stood before the throne and [did not know what to say|had forgotten everything]. {he} took a step back "
    "and [trod on the tail of the royal cat|sat down on a cake]. The cat [jumped on the chandelier|ran up the "
    "curtain], the curtain fell on the minister, and the minister walked into [the drum|the soup].",
    "it was very quiet in the hall. Then there was a small sound, like [a rusty hinge|a mouse in a box]. It was "
    "the king. His shoulders shook. He laughed until [his crown rolled down the steps|the tears ran into his "
    "beard].",
    '"Half the kingdom is yours," said the king. "[I would not know where to put it|Thank you, my garden is '
    'enough for me]," said {hero}. "[I only want my friend|But please let {friend} go]."',
    "so they walked home together. The king [visits them on Sundays|came to tea the very next week], [and the "
    "minister makes a detour around the cat|without his crown, and always sits down next to the cat].",
)
FERRY = (
    '{hero} rowed people across the river. {he} took no money. "[Tell me a story instead|One crossing costs one '
    'true story]," {he} always said. So {he} [knew more stories than the library|was never bored].',
    '{weather2}, {friend} stood on the bank, a {trait2} {kind2} with [no luggage|an empty bag]. "I have no '
    'story," said {friend}. "[Nothing has ever happened to me|My days are all the same]." "[Then we shall wait '
    'until you have one|Get in anyway]," said {hero}.',
    "in the middle of the river [a fog came down|the oar broke|a storm came up]. They could see neither bank. "
    "{friend} was afraid, and {hero} [sang to {him2}|gave {him2} half of {his} {food}]. A [swan|fish as long as "
    "the boat|floating {treasure}] came by, and [looked at them as if they were late|was gone again].",
    "all night long they drifted. {friend} [rowed with {his2} hands|held up the lantern]. {hero} [counted the "
    "bells of the villages|listened for the frogs]. In the morning the fog rose, and they were [on the other "
    "side|where they had started].",
    '"[I am sorry|It took a little longer]," said {hero}. But {friend} jumped ashore with shining eyes. "[You '
    'will not believe what happened to me|I was on the river all night]," {he2} said to the first person {he2} '
    "met, and [did not stop talking until noon|told the whole story, and then again from the beginning].",
    '{hero} smiled, and pushed off. "[Paid in full|That makes one more]," {he} said to the river.',
)
RAIN = (
    "it had not rained {near} for [a hundred days|a whole summer]. [The river was a road|The frogs had moved "
    "away]. {hero} had one [bucket of water|watering can] left, and {he} gave a little of it to every flower.",
    '{weather2}, {friend} came along the dusty road, a {trait2} {kind2} with a dry throat. "[Could you spare a '
    'sip|Is there a well here]?" asked {friend}. {hero} looked into the bucket. There was [one cup|one sip] left. '
    '"[Take it|It is yours]," {he} said.',
    "{friend} drank half of it, and [poured the other half on the smallest flower|gave the other half to a thirsty "
    '{animal}]. "[It is good water|Thank you]," said {friend}. "[I carry something for such days|May I show you '
    'something]?" And {he2} took a {treasure} out of {his2} coat.',
    "{friend} [held it up to the sky|put it to {his2} ear and shook it]. At first nothing happened. Then [a cloud "
    "the size of a hand|a small gray cloud] came over the hill, [looked around|hesitated], and called the others.",
    "it rained. It rained on the fields and on the roofs, [on the mayor and on the geese|into every bucket and "
    "every hat]. People ran out of their houses and [danced in the street|stood there with open mouths].",
    "when {hero} turned around, {friend} was gone, [and only wet footprints led up the road|but the bucket was "
    "full]. It has been full ever since.",
)
TRAIN = (
    "{weather2}, {hero} sat in the wrong train. {he} had wanted to go to [{his} aunt|the market|work], but outside "
    "there was suddenly [the sea|snow|a country that {he} did not know].",
    '"[Does this train stop somewhere|Where are we going]?" {he} asked. On the other seat sat {friend}, a '
    '{trait2} {kind2} with a {treasure} on {his2} knees. "[Nobody knows|That is the best thing about it]," said '
    '{friend}. "[I get in every Monday|I always take the wrong train]. [Would you like some {food}|Look, a '
    'bridge]!"',
    "they passed [a station where nobody got in but a {kind3} with a suitcase|a town in which all the clocks were "
    "asleep]. They passed [fields of {color} flowers|a lake with a piano on it]. {hero} [forgot the time|pressed "
    "{his} nose to the window].",
    '"[I have never been late in my life|I should be worried]," said {hero}. "[And what did you see on the '
    'way|Are you]?" asked {friend}. {hero} thought about it. "[Nothing|I always looked at my watch]," {he} said.',
    "at the last station they got out. [There was only a bench, and the evening|There was a small cafe with two "
    "chairs], and they [shared the last of the {food}|watched the sun go down] until the train went back.",
    "{hero} still takes the right train, most of the time. But on [Mondays|the first warm day of the year], {he} "
    "[gets in without looking at the sign|lets the wrong one decide].",
)
# Each plot with the lessons that can be drawn from it, as numbers in MORALS; none where it speaks for itself.
PLOTS = {
    LOST: (3, 11, 13),
    WISH: (2, 4, 5, 7, 13, 14),
    RESCUE: (3, 4, 8, 9, 10),
    QUARREL: (0, 1, 3, 12, 15),
    STRANGER: (0, 1, 8, 12),
    RIDDLE: (2, 7, 14, 15),
    FEAR: (3, 4, 9, 10),
    TRADE: (0, 3, 8, 12),
    GREED: (0, 1, 3, 8),
    FEAST: (1, 3, 11, 13, 20),
    DRAGON: (0, 2, 4, 9, 15),
    RACE: (2, 5, 16),
    SEED: (2, 14, 19),
    MYSTERY: (0, 1, 8, 13),
    THREE_WISHES: (3, 12, 17, 20),
    VOYAGE: (3, 12, 18, 20),
    VOICE: (2, 15),
    NEIGHBOR: (0, 3, 7, 8),
    CLOCK: (2, 15),
    LETTER: (),
    SHADOW: (),
    MOON: (),
    SHOP: (),
    STAR: (),
    DOOR: (),
    GHOST: (),
    COLORS_PLOT: (),
    GIANT: (),
    CONTEST: (),
    WINTER: (),
    TREE: (),
    LAUGH: (),
    FERRY: (),
    RAIN: (),
    TRAIN: (),
}
