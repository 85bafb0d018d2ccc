"""The words prompts are made of. Every list is written by hand; none comes from a benchmark.

A topic that occurs in a held-out prompt, and a template that matches one, are dropped by `prompts.py`, so that held-out prompts are
neither in the training set nor siblings of anything in it.
"""

from __future__ import annotations

SCIENCE = """photosynthesis|gravity|magnetism|plate tectonics|evolution by natural selection|the water cycle|the greenhouse effect|black holes|DNA
cell division|the periodic table|chemical bonds|acids and bases|electricity|static electricity|radio waves|lightning|earthquakes|volcanoes|glaciers|coral reefs
the human heart|the nervous system|digestion|the lungs|sleep|memory|antibiotics|viruses and bacteria|genes and inheritance|stem cells|food chains
the solar system|comets|eclipses|the speed of light|the Big Bang|nuclear fusion|nuclear fission|semiconductors|lasers|microscopes|telescopes|batteries|solar panels
wind turbines|entropy|quantum mechanics|the theory of relativity|sound waves|the ozone layer|ocean currents|fossils|dinosaurs|photosensitivity in plants
pollination|migration of birds|hibernation|camouflage in animals|the nitrogen cycle|erosion|crystals|superconductivity|friction|buoyancy|air pressure"""

TECHNOLOGY = """machine learning|neural networks|databases|operating systems|cloud computing|encryption|passwords and password managers|the internet|web browsers
search engines|email|version control|unit testing|recursion|binary numbers|sorting algorithms|hash tables|linked lists|stacks and queues|binary search
graphs and trees in computing|object-oriented programming|functional programming|compilers|caching|load balancing|APIs|microservices|open source software
regular expressions|garbage collection|threads and processes|blockchain|virtual reality|3D printing|robots|drones|smart watches|touch screens|GPS|Wi-Fi|barcodes
spreadsheets|data privacy|phishing|computer viruses|backups|artificial intelligence in medicine|speech recognition|recommendation systems|big data|debugging
code review|agile development|technical debt|continuous integration|containers and virtual machines|SQL joins|JSON|HTML and CSS|user interfaces|accessibility on the web"""

SOCIETY = """democracy|inflation|supply and demand|compound interest|taxes|insurance|the stock market|unemployment|globalisation|urbanisation|public transport
renewable energy|climate change|deforestation|plastic pollution|water scarcity|education reform|remote work|social media|advertising|fake news|freedom of speech
human rights|immigration|minimum wage|universal basic income|trade unions|voting systems|the separation of powers|international trade|the United Nations
the Industrial Revolution|the French Revolution|the Renaissance|the Cold War|ancient Egypt|ancient Greece|the Silk Road|the Middle Ages|the Black Death
the invention of printing|the space race|the fall of the Berlin Wall|colonialism|the Olympic Games|museums|public libraries|volunteering|recycling programmes in cities
electric cars|nuclear power|organic farming|fast fashion|tourism|zoos|school uniforms|homework|video games|mobile phones in classrooms|standardised tests
studying abroad|a gap year|working from home|a four-day work week|keeping pets in flats|owning a car|online shopping|cash-free payments|early retirement"""

SKILLS = """time management|public speaking|learning a new language|playing the guitar|learning the piano|chess|photography|drawing portraits|creative writing|cooking pasta
baking bread|growing herbs|keeping houseplants alive|running a first 5 km race|yoga|meditation|swimming|cycling to work|saving money|making a budget|negotiating a salary
writing a CV|giving feedback|running a meeting|note-taking|reading faster|remembering names|falling asleep|waking up early|breaking a bad habit|staying motivated
studying for exams|writing an essay|learning to program|using a spreadsheet|organising a wardrobe|planning a birthday party|planning a camping trip|packing a suitcase
training a puppy|raising a kitten|caring for goldfish|making new friends|handling stress|resolving conflicts at work|starting a small business|selling things online
making coffee|brewing tea|cooking rice|making soup from leftovers|building a bookshelf|painting a room|fixing a leaking tap|sewing a button|knitting a scarf|first aid"""

THINGS = """a bicycle|a piano|a candle|an umbrella|a bridge|a windmill|a compass|a clock|a mirror|a kite|a pencil|a suitcase|a garden|a library|a train station|a market
a mountain cabin|a sailing boat|a hot-air balloon|a snowman|a teapot|a robot that wants to paint|a lost key|a forgotten letter|a talking tree|a shy dragon|a brave mouse
an honest merchant|a young astronaut|a retired sailor|a clumsy wizard|two rival chefs|a night train|a secret door|a village without clocks|a stubborn goat|a clever fox
a lonely cloud|a child who collects stones|a music box|a broken robot|a travelling circus|a fisherman and his daughter|an owl who fears the dark|a baker who sells dreams
an island that moves|a river that sings|a detective in a small town|a spaceship cook|a king who cannot sleep|a girl who talks to plants|an old typewriter|a magic pencil"""

PLACES = """Portugal|Japan|Brazil|Kenya|Canada|Norway|Peru|Vietnam|Morocco|New Zealand|Scotland|Italy|Greece|Mexico|India|Turkey|Finland|Argentina|Thailand|South Africa
Spain|Ireland|Poland|Chile|Egypt|Indonesia|Austria|Sweden|Croatia|Nepal|Hungary|Denmark|Belgium|the Netherlands|Switzerland|Colombia|Cuba|Jordan|Tanzania|Mongolia
Australia|Germany|France|South Korea|the Philippines|Malaysia|Iran|Ukraine|Romania|Bulgaria|Estonia|Latvia|Lithuania|Slovakia|Slovenia|Ecuador|Bolivia|Uruguay|Ghana|Senegal"""

CITIES = "Paris|London|Rome|Tokyo|Lisbon|Vienna|Prague|Barcelona|Istanbul|New York|Sydney|Amsterdam|Berlin|Cairo|Mumbai|Seoul|Toronto|Dublin|Athens|Copenhagen|Chicago|Singapore"

PEOPLE = """Isaac Newton|Albert Einstein|Charles Darwin|Ada Lovelace|Alan Turing|Leonardo da Vinci|Galileo Galilei|Nikola Tesla|Florence Nightingale|Cleopatra|Julius Caesar
Napoleon Bonaparte|Abraham Lincoln|Mahatma Gandhi|Nelson Mandela|Martin Luther King|William Shakespeare|Jane Austen|Mark Twain|Mozart|Beethoven|Vincent van Gogh
Pablo Picasso|Frida Kahlo|Neil Armstrong|Amelia Earhart|Christopher Columbus|Marco Polo|Aristotle|Plato|Confucius|Johannes Gutenberg|Louis Pasteur|Rosa Parks|Grace Hopper"""

RECIPES = """pancakes|vegetable soup|an omelette|spaghetti with tomato sauce|a fruit salad|banana bread|chicken curry|guacamole|hummus|apple pie|fried rice|lentil stew|pizza dough
mashed potatoes|a Greek salad|chocolate chip cookies|oatmeal|a smoothie|lemonade|roast vegetables|potato salad|tacos|French toast|rice pudding|garlic bread|mushroom risotto"""

RECIPIENTS = "my manager|a customer|my landlord|a colleague|my professor|the human resources department|a supplier|the city council|my team|a hotel|an airline|a potential employer|the school principal|a job candidate"
ERRANDS = """asking for two days of leave|apologising for a late delivery|thanking them for their help|asking for a deadline extension|announcing a new project
reporting a broken heating system|inviting them to a meeting on Friday|asking for a letter of recommendation|following up after an interview|cancelling a reservation
requesting a refund|asking about parking|introducing myself|declining an invitation politely|asking for feedback on a report|reminding them about an unpaid invoice
suggesting a new coffee machine|explaining why I was absent yesterday|proposing a new meeting time|congratulating them on a promotion"""

EXPLAIN = """Explain {t} to a beginner.|What is {t}?|Explain {t} in simple terms.|Write a short summary about {t}.|List five important facts about {t}.|Why does {t} matter?
What are common misconceptions about {t}?|Give an everyday example that illustrates {t}.|How would you teach {t} to a class of teenagers?|Write a short quiz with answers on {t}.
Describe {t} in one paragraph.|What are the key ideas behind {t}?|Tell me something surprising about {t}.|Write an introduction to an article about {t}.|How does {t} affect our daily life?
What questions about {t} are still open?|Write three questions that a student might ask about {t}.|Explain {t} using an analogy.|Give me a brief overview of the history of {t}.|Define {t} in two sentences.
What should everyone know about {t}?|I have to give a five-minute talk on {t}. Write an outline.|Why is {t} hard to understand?|{t}: explain the basics step by step."""

DEBATE = """What are the pros and cons of {t}?|Discuss the advantages and disadvantages of {t}.|Write a persuasive paragraph in favour of {t}.|Write a paragraph arguing against {t}.
How has {t} changed over the last fifty years?|What are the causes and effects of {t}?|Describe how {t} influences young people.|List three benefits and three risks of {t}.
Write a short newspaper article about {t}.|What could governments do about {t}?|How will {t} look in thirty years?|Write a conclusion for an essay on {t}.|What do critics say about {t}?"""

ADVICE = """Give me five tips for {t}.|How do I get better at {t}?|What mistakes do people make when {t} is new to them?|Write a step-by-step guide to {t}.|I am a beginner at {t}. Where should I start?
Make a one-week plan for {t}.|What equipment or material do I need for {t}?|Write a short blog post about {t}.|How long does {t} take, and what can I expect?|Write a checklist for {t}.
Explain the most important rule of {t}.|What are the benefits of {t}?|Write an encouraging message to someone who struggles with {t}."""

CREATIVE = """Write a short story about {t}.|Write a poem about {t}.|Write the first paragraph of a novel about {t}.|Describe {t} in vivid detail.|Write a bedtime story about {t}.
Write a funny limerick about {t}.|Write a story about {t} that ends with a surprise.|Tell a story about {t} in exactly five sentences.|Write a letter from the point of view of {t}.
Come up with three story ideas about {t}.|Write a short fairy tale about {t}.|Write a song chorus about {t}.|Write a scene with dialogue that involves {t}."""

TRAVEL = """What is the capital of {t}?|What language do people speak in {t}?|Name three things to see in {t}.|Plan a three-day trip to {t}.|Describe the food of {t}.|What is the weather like in {t}?
Tell me about the geography of {t}.|What is {t} famous for?|Write a postcard from {t}.|When is the best time to visit {t}?|What customs should a visitor to {t} know?|On which continent is {t}?"""

CITY = """What are the best places to visit in {t}?|Plan a one-day walking tour of {t}.|Write a short description of {t} for a travel guide.|How do people get around in {t}?|What is special about {t}?"""

BIOGRAPHY = """Write a short biography of {t}.|What did {t} achieve?|Why is {t} still important today?|Write an imaginary conversation with {t}.|List three facts about {t}.|When did {t} live, and where?"""

COOKING = """Give me a recipe for {t}.|How do I make {t}?|What ingredients do I need for {t}?|Write a shopping list for {t} for four people.|What goes well with {t}?|How can I make {t} healthier?"""

CHAT = """Hello|Hi!|Hi there, how are you?|Good morning!|Hey, what's up?|Thank you!|Who are you?|What can you do?|Are you a robot?|Tell me a joke.|Tell me a fun fact.|I'm bored.|I'm feeling sad today.
I had a great day!|What is your favourite colour?|Do you like music?|Can you help me?|What day comes after Tuesday?|How many days are in a year?|How many continents are there?|What is the largest ocean?
What is the tallest mountain?|Who wrote Hamlet?|Who painted the Mona Lisa?|What is 12 times 12?|What is 15 + 27?|What is the square root of 81?|What colour do you get when you mix blue and yellow?
What is the opposite of hot?|What is H2O?|What is the freezing point of water?|What is the longest river in the world?|How many legs does a spider have?|What do cows eat?|Good night!|Goodbye!
Give me a word that rhymes with cat.|Give me a synonym for happy.|Give me an antonym for brave.|Recommend me a book.|Recommend a movie for tonight.|What should I cook for dinner?|How old is the universe?
What sound does a cat make?|Can you speak French?|Write a sentence with the word 'ocean'.|Count from 1 to 20.|List the months of the year.|List the planets of the solar system.|Say something nice.
What is the meaning of life?|Help me choose a gift for my sister.|Tell me about yourself.|What time is it?|Do you dream?|Please wish me luck!|What is a good hobby?|How do you spell 'necessary'?"""

NAMES = "Anna|Ben|Carla|David|Elena|Farid|Grace|Hiro|Ines|Jonas|Kira|Liam|Mara|Noah|Olga|Pedro|Rita|Samir|Tara|Victor"
PASSAGES = """{n} runs a small bookshop in {c}. Last spring sales fell by a third because of road works in front of the shop. {n} started weekly readings and a delivery service by bicycle. By autumn the shop sold more than ever before.
The new bridge in {c} opened on Monday after four years of construction. It is 600 metres long and carries trams, bicycles and pedestrians, but no cars. {n}, who led the project, said that it cost less than planned. Shop owners nearby hope for more visitors.
{n} and a group of students measured the noise in forty streets of {c}. They found that streets with trees were quieter than streets without. The difference was largest in the evening. They want to repeat the study in winter, when the trees have no leaves.
Our meeting on Tuesday was short. {n} reported that the website is finished and that the tests passed. We still need photos from the {c} office. The launch is planned for the first of May, and {n} will write to all customers a week before.
The community garden in {c} has eighty plots and a waiting list of two years. {n} proposes to divide the larger plots. Some members are against it because they have built sheds. A vote will be held at the end of the month.
When {n} moved to {c}, the flat was empty and the heating did not work. The first week was hard. A neighbour lent blankets and a lamp, and on Sunday they cooked together. Ten years later they still share a meal every Sunday.
Researchers from {c} have built a sensor that detects leaks in water pipes by listening to them. It costs less than a smartphone and runs for five years on one battery. {n}, the lead engineer, expects that a city could save a tenth of its water.
The school in {c} changed its timetable: lessons start at nine instead of eight. After one year, marks in mathematics rose slightly and fewer students were late. Parents who begin work early complained. {n}, the head teacher, wants to offer a breakfast club."""
PASSAGE_TASKS = """Summarise the following text in two sentences.|What is the main idea of this text?|Rewrite the following text for a ten-year-old reader.|Write a headline for the following text.|List the key points of this text as bullets.
Rewrite the following text in a more formal tone.|Shorten the following text to half its length.|Write three questions about the following text and answer them.|Continue the following text with one more paragraph.|Rewrite this text as a dialogue.
Who is mentioned in this text and what do they do?|Extract the problem and the solution from the following text."""

SENTENCES = """The meeting was very long and it was also boring and nobody decided anything.|I think that the food in this restaurant is good but the service is slow.|She don't like to going to the beach when it are crowded.
We need this fixed right now because customers are angry.|The results was better then we expected, however they are not final.|Hey, send me the file asap, thanks.|In my opinion the movie was kind of okay, I guess.
Due to the fact that it was raining, we made the decision to cancel the picnic.|He runned to the station but the train had leave already.|Your product broke after two days and I want my money back.
The old house stood on the hill and the wind blew through its windows.|The reason why I am late is because my alarm did not ring.|I can't come tomorrow, something came up.|The company has went through many changes since five years.
There is many reason to learn music.|It is important that we should all try to be more careful with water.|The dog chased the cat and the cat climbed the tree and the bird flew away."""
SENTENCE_TASKS = """Rewrite this sentence more politely|Make this sentence shorter|Fix the grammar|Rewrite this in a formal style|Rewrite this in a casual style|Make this sentence more vivid|Express this in three different ways|Explain what is wrong with this sentence"""

LISTS = """animals that live in the desert|vegetables that grow underground|things to do on a weekend|ideas for a birthday present|healthy snacks|musical instruments|words that describe a storm|questions for a job interview
reasons to learn a second language|ways to save energy at home|outdoor games for children|books for teenagers|names for a cat|names for a start-up that sells bicycles|conversation starters|topics for a school project
jobs that involve animals|inventions that changed the world|tips for a long flight|warm-up exercises|things you can build with cardboard|rules for a shared kitchen|qualities of a good teacher|adjectives for a city
ways to say thank you|plants for a dark room|uses for an old newspaper|foods rich in protein|countries in South America|chemical elements and their symbols|famous inventors|sports played with a ball"""
LIST_TASKS = "List ten {t}.|Give me a list of {t}.|Name five {t} and explain each in one sentence.|Make a table of {t} with a short comment on each.|What are some {t}?"

COMPARE = """cats and dogs|tea and coffee|books and films|trains and planes|summer and winter|Python and JavaScript|lists and tuples in Python|cities and villages|paper books and e-readers|a virus and a bacterium
weather and climate|mass and weight|a star and a planet|speed and velocity|a comet and an asteroid|HTTP and HTTPS|TCP and UDP|RAM and a hard disk|renting and leasing a car|stocks and bonds|a debit card and a credit card
frogs and toads|butter and margarine|metaphors and similes|mean and median|integers and floating-point numbers|a stack and a queue|a compiler and an interpreter|an essay and a report|jogging and walking|empathy and sympathy"""
COMPARE_TASKS = "Compare {t}.|What is the difference between {t}?|What do {t} have in common?|Explain the differences between {t} in a few bullet points.|When should one choose between {t}, and how?"

# Exercises for code: "Return the {a} of {b}."
QUANTITIES = """sum|product|maximum|minimum|median|mode|range|average|second largest value|number of distinct values|longest run of equal values|first repeated value|index of the smallest value|values that occur twice"""
COLLECTIONS = """a list of integers|the even numbers of a list|the values of a dictionary|the digits of an integer|the word lengths of a sentence|a nested list|the positive numbers of a list|every third element of a list
the prime numbers in a list|the lengths of a list of strings|two lists combined|the ASCII codes of a string|the rows of a matrix|the columns of a matrix|the squares of a list"""
PROGRAMS = """reverses a string|checks whether a word is a palindrome|counts the vowels in a text|converts Celsius to Fahrenheit|computes a factorial|prints the Fibonacci numbers up to n|checks whether a number is prime
finds the greatest common divisor of two numbers|removes duplicates from a list and keeps the order|merges two sorted lists|counts how often each word occurs in a text|rotates a list by k places|transposes a matrix|flattens a nested list
validates an email address|reads a CSV file and sums one column|writes a list of dictionaries to a JSON file|finds all files with a given extension|implements a stack class|implements a queue with two stacks|implements binary search
implements bubble sort|implements quicksort|implements a bank account class|simulates rolling two dice|plays rock, paper, scissors|guesses a number between 1 and 100|converts an integer to Roman numerals|converts a binary string to an integer
checks whether brackets are balanced|finds the longest word in a sentence|computes the average of the numbers in a file|groups words by their first letter|counts the lines of a file|draws a triangle of stars|computes compound interest
checks whether a year is a leap year|generates a random password|capitalises every word of a sentence|finds the missing number in a list from 1 to n|splits a list into chunks of size n|inverts a dictionary|measures how long a function takes
implements a linked list|computes the distance between two points|encrypts a text with a Caesar cipher|finds common elements of two lists|sorts a list of tuples by the second item|parses a date string|retries a function up to three times"""
PROGRAM_TASKS = """Write a Python function that {t}.|Write a program that {t} and explain how it works.|Write a Python script that {t}. Include an example.|Write a JavaScript function that {t}.|How can I write code that {t}?|Write a function that {t}, with unit tests.
Write a class or function in Python that {t}. Add a docstring and type hints.|Show two ways to write a Python function that {t}.|Write a Java method that {t}.|Write pseudocode for an algorithm that {t}."""


def split(text: str) -> list[str]:
    """'a|b' with line breaks as further separators -> [a, b]."""
    return [item.strip() for line in text.splitlines() for item in line.split("|") if item.strip()]
