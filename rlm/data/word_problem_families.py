# ruff: noqa: E501 - a wording stays on one line, however long, so that the table reads as data.
"""The stories of `rlm.word_problems`, as a table.

To add a family, add a row: a few ways to tell the story, the numbers it may hold and the steps
that solve it. The sampler only keeps numbers for which every step gives a positive integer of a
moderate size, so a row states ranges and no conditions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NAMES = (
    *("Ada", "Amir", "Ben", "Carla", "Diego", "Elif", "Emma", "Farah", "Grace", "Hana", "Ivan"),
    *("Jonah", "Kofi", "Lena", "Leo", "Maya", "Mei", "Nina", "Noah", "Olga", "Omar", "Priya"),
    *("Ravi", "Rosa", "Sam", "Sofia", "Tariq", "Tom", "Yuki", "Zoe"),
)

# Plural nouns: a text that says {fruit} means one of these, the same one wherever it says it.
NOUNS: Mapping[str, tuple[str, ...]] = {
    "fruit": ("apples", "pears", "plums", "oranges", "peaches", "lemons"),
    "keepsake": ("stamps", "marbles", "stickers", "shells", "badges", "buttons"),
    "supply": ("pens", "notebooks", "erasers", "markers", "rulers", "folders"),
    "bake": ("cookies", "muffins", "rolls", "tarts", "bagels", "scones"),
    "flower": ("roses", "tulips", "daisies", "lilies", "poppies"),
}


@dataclass(frozen=True)
class Family:
    """One story: its steps, the numbers it may hold and several ways to tell it.

    A step reads ``name = left op right``: op is one of ``+ - * /``, left and right are a number's
    name, an earlier step's name or a literal. The last step is the answer.

    Wordings hold ``{number name}`` for every number, ``{name}`` and ``{friend}`` for two people,
    and the keys of NOUNS. A distractor is a true but useless sentence about ``{extra}``; it is put
    first or just before the last sentence, so both must still make sense there.

    A held-out family is never trained on: it measures transfer to an unseen story.
    """

    name: str
    steps: tuple[str, ...]
    numbers: Mapping[str, Sequence[int]]
    wordings: tuple[str, ...]
    distractors: tuple[str, ...] = ()
    held_out: bool = False

    @property
    def level(self) -> int:
        """The number of arithmetic steps."""
        return len(self.steps)


ONE_STEP = (
    Family(
        "gather_more",
        steps=("total = start + found",),
        numbers={"start": range(4, 41), "found": range(3, 31)},
        wordings=(
            "{name} has {start} {keepsake}. A cousin brings {found} more. How many {keepsake} does {name} have now?",
            "There are {start} {keepsake} in {name}'s drawer and {found} on the desk. How many {keepsake} is that altogether?",
            "How many {keepsake} does {name} own, with {start} in a red tin and {found} in a blue tin?",
            "{name} finds {found} {keepsake} in the attic and puts them in a box that already holds {start}. How many {keepsake} are in the box?",
            "One jar holds {start} {keepsake} and another holds {found}. If {name} pours both into a bowl, how many {keepsake} are in the bowl?",
        ),
        distractors=("{name} is {extra} years old.", "{friend} has {extra} books."),
    ),
    Family(
        "give_away",
        steps=("fruit_left = start - given",),
        numbers={"start": range(8, 51), "given": range(3, 31)},
        wordings=(
            "{name} picks {start} {fruit} and gives {given} to {friend}. How many {fruit} does {name} keep?",
            "A basket holds {start} {fruit}. {name} takes out {given}. How many {fruit} are left in the basket?",
            "How many {fruit} remain if {name} cooks {given} of the {start} in the kitchen?",
            "{friend} gets {given} of {name}'s {start} {fruit}. How many {fruit} does {name} still have?",
            "Out of a crate of {start} {fruit}, {name} throws away {given} bad ones. How many good {fruit} are there?",
        ),
        distractors=("It is {extra} degrees outside.", "{friend} is {extra} years old."),
    ),
    Family(
        "shopping_cost",
        steps=("cost = price * count",),
        numbers={"price": range(2, 13), "count": range(2, 13)},
        wordings=(
            "{name} buys {count} {supply} at {price} dollars each. How many dollars does {name} pay?",
            "A shop sells {supply} for ${price} each. How much do {count} {supply} cost {name}?",
            "How many dollars does {name} need for {count} {supply} if each one costs ${price}?",
            "Each of the {count} {supply} on {name}'s list costs {price} dollars. What is the total cost in dollars?",
            "For school, {name} orders {count} {supply}. The price is ${price} apiece. How much is the order?",
        ),
        distractors=(
            "{name} is in line behind {extra} people.",
            "The shop opened {extra} years ago.",
        ),
    ),
    Family(
        "rows_of_seats",
        steps=("total = rows * per_row",),
        numbers={"rows": range(2, 13), "per_row": range(3, 13)},
        wordings=(
            "{name} sets up {rows} rows of {per_row} chairs. How many chairs does {name} use?",
            "A hall has {rows} rows with {per_row} chairs in each row. How many chairs must {name} clean?",
            "In a theater, every row has {per_row} seats. How many seats are in {rows} rows?",
            "How many people can sit on {rows} benches if each bench seats {per_row} people?",
            "{name}'s school photo shows {rows} rows of {per_row} students. How many students are in the photo?",
        ),
        distractors=("The building is {extra} years old.",),
    ),
    Family(
        "share_equally",
        steps=("share = total / people",),
        numbers={"total": range(8, 101), "people": range(2, 11)},
        wordings=(
            "{name} shares {total} {bake} equally among {people} friends. How many {bake} does each friend get?",
            "{name} splits a tray of {total} {bake} evenly onto {people} plates. How many {bake} go on each plate?",
            "How many {bake} does each of {people} children get if they share {total} equally?",
            "There are {total} {bake} for the {people} guests of {name}. Every guest gets the same number. How many {bake} is that per guest?",
            "{name} packs {total} {bake} into {people} boxes, with the same number in every box. How many {bake} are in one box?",
        ),
        distractors=("The oven was on for {extra} minutes.",),
    ),
    Family(
        "make_groups",
        steps=("groups = total / size",),
        numbers={"total": range(8, 101), "size": range(2, 13)},
        wordings=(
            "{name} packs {total} eggs into cartons of {size}. How many cartons does {name} fill?",
            "The {total} children at {name}'s camp form teams of {size}. How many teams are there?",
            "Each shelf holds {size} books. How many shelves does {name} need for {total} books?",
            "How many bunches of {size} can {name} make from {total} {flower}?",
            "{name} must move {total} boxes. The cart takes {size} boxes per trip. How many trips does {name} make?",
        ),
    ),
    Family(
        "compare_amounts",
        steps=("difference = more - fewer",),
        numbers={"more": range(8, 61), "fewer": range(3, 41)},
        wordings=(
            "{name} reads {more} pages and {friend} reads {fewer} pages. How many more pages does {name} read?",
            "{friend} scores {fewer} points in a game, while {name} scores {more}. By how many points does {name} win?",
            "A red ribbon is {more} inches long and a blue one is {fewer} inches long. How many inches longer is the red ribbon?",
            "How many fewer {keepsake} does {friend} have than {name}, if {name} has {more} and {friend} has {fewer}?",
            "There are {more} goats on {name}'s farm and {fewer} goats on {friend}'s farm. How many more goats does {name} have?",
        ),
    ),
    Family(
        "money_at_first",
        steps=("money_at_first = spent + left",),
        numbers={"spent": range(4, 41), "left": range(3, 41)},
        wordings=(
            "{name} spends {spent} dollars and has {left} dollars left. How many dollars did {name} have at first?",
            "After giving {friend} {spent} dollars, {name} still has ${left}. How much did {name} have before?",
            "{name} buys a hat for ${spent} and comes home with ${left}. How many dollars did {name} take to the shop?",
            "How much was in {name}'s wallet before a lunch of {spent} dollars, if {left} dollars remain?",
        ),
        distractors=("{name} walks {extra} minutes to the shop.",),
    ),
    Family(
        "still_to_go",
        steps=("remaining = goal - done",),
        numbers={"goal": range(12, 71), "done": range(4, 51)},
        wordings=(
            "A bike costs {goal} dollars. {name} has saved {done} dollars. How many more dollars does {name} need?",
            "{name} plans to walk {goal} miles this month and has walked {done} so far. How many miles are left to walk?",
            "A train has {goal} seats, and {done} of them are taken when {name} gets on. How many seats are free?",
            "How many pages must {name} still read in a book of {goal} pages after reading {done}?",
        ),
        distractors=("{friend} is {extra} years old.",),
    ),
    Family(
        "hourly_pay",
        steps=("pay = rate * hours",),
        numbers={"rate": range(5, 21), "hours": range(2, 11)},
        wordings=(
            "{name} earns {rate} dollars an hour. How many dollars does {name} earn in {hours} hours?",
            "A painter charges {name} ${rate} per hour. What is the bill for {hours} hours?",
            "{name} is paid ${rate} for each hour of work. How much is {name} paid for {hours} hours?",
            "{name} works {hours} hours this weekend, and each hour pays ${rate}. How much does {name} make this weekend?",
        ),
        distractors=("The trip to work takes {extra} minutes.",),
    ),
    Family(
        "times_as_many",
        steps=("times_as_many = base * times",),
        numbers={"base": range(3, 16), "times": range(2, 11)},
        wordings=(
            "{friend} has {base} {keepsake}. {name} has {times} times as many. How many {keepsake} does {name} have?",
            "{name}'s puppy weighs {base} pounds. The puppy's mother weighs {times} times as much. How many pounds does the mother weigh?",
            "{name} builds a tower of {base} blocks. {friend} uses {times} times as many blocks. How many blocks does {friend} use?",
            "How many feet long is {name}'s rope if it is {times} times as long as {friend}'s rope of {base} feet?",
        ),
    ),
    Family(
        "distance_travelled",
        steps=("distance = speed * hours",),
        numbers={"speed": range(3, 21), "hours": range(2, 11)},
        wordings=(
            "A boat moves at {speed} miles per hour. How many miles does it go in {hours} hours?",
            "{name} travels for {hours} hours at {speed} miles per hour. How many miles is that?",
            "How far, in miles, does {name} get in {hours} hours when covering {speed} miles every hour?",
            "Every hour {name}'s wagon rolls {speed} miles. The ride lasts {hours} hours. How many miles long is the ride?",
        ),
    ),
    Family(
        "age_later",
        steps=("age = age_now + years",),
        numbers={"age_now": range(4, 51), "years": range(2, 21)},
        wordings=(
            "{name} is {age_now} years old. How old will {name} be in {years} years?",
            "In {years} years {name} will have a big birthday party. {name} is {age_now} now. What age will the party celebrate?",
            "How old is {name} today, if {name} turned {age_now} exactly {years} years ago?",
            "{friend} is {age_now} years old and {name} is {years} years older. What is {name}'s age?",
        ),
        held_out=True,
    ),
    Family(
        "rectangle_area",
        steps=("area = length * width",),
        numbers={"length": range(4, 16), "width": range(2, 13)},
        wordings=(
            "{name}'s garden is {length} feet long and {width} feet wide. What is its area in square feet?",
            "How many square tiles, each 1 foot wide, cover a floor of {length} feet by {width} feet?",
            "{name} lays a carpet that measures {length} by {width} feet. How many square feet does the carpet cover?",
            "A rectangular field has sides of {length} yards and {width} yards. Find its area in square yards for {name}.",
        ),
        held_out=True,
    ),
)

TWO_STEPS = (
    Family(
        "change_from_bill",
        steps=("cost = price * count", "change = paid - cost"),
        numbers={
            "price": range(2, 16),
            "count": range(2, 13),
            "paid": (20, 30, 40, 50, 60, 80, 100),
        },
        wordings=(
            "{name} buys {count} {supply} at {price} dollars each and pays with {paid} dollars. How many dollars does {name} get back?",
            "With {paid} dollars in hand, {name} pays for {count} {supply}. Each one costs {price} dollars. How much change does {name} receive?",
            "How many dollars does {name} have left from ${paid} after buying {count} {supply} for ${price} apiece?",
            "At the store, {supply} cost ${price} each. {name} takes {count} of them and hands over ${paid}. How much is the change?",
            "{friend} gives {name} {paid} dollars to buy {count} {supply}. If each costs {price} dollars, how much money should {name} bring back?",
        ),
        distractors=(
            "The store has {extra} shelves.",
            "The walk to the store takes {extra} minutes.",
        ),
    ),
    Family(
        "order_with_delivery",
        steps=("items_cost = price * count", "total_cost = items_cost + delivery"),
        numbers={"price": range(2, 21), "count": range(2, 16), "delivery": range(3, 26)},
        wordings=(
            "{name} orders {count} plants online for {price} dollars each. Delivery costs {delivery} dollars. How many dollars does {name} pay in total?",
            "Delivery is ${delivery} for any order. How much does {name} pay for {count} lamps at ${price} each, delivery included?",
            "A website charges {price} dollars per puzzle plus {delivery} dollars to ship the order. What is {name}'s bill for {count} puzzles?",
            "What does {name} spend on {count} mugs if one mug costs ${price} and sending the whole parcel costs ${delivery}?",
        ),
        distractors=("The order arrives after {extra} days.",),
    ),
    Family(
        "bus_stop",
        steps=("staying = start - off", "on_board = staying + on"),
        numbers={"start": range(12, 71), "off": range(3, 41), "on": range(2, 41)},
        wordings=(
            "A bus carries {start} people. At the next stop {off} get off and {on} get on. How many people are on the bus now?",
            "{name} drives a bus with {start} passengers. At the market {off} leave and {on} others climb in. How many passengers does {name} carry then?",
            "At the station {off} of the {start} people on {name}'s train step out. Then {on} new people step in. How many people are on the train now?",
            "How many riders are on {name}'s ferry, if it came in with {start}, let {off} off and took on {on}?",
        ),
        distractors=("The next stop is {extra} minutes away.", "A ticket costs {extra} dollars."),
    ),
    Family(
        "packs_used",
        steps=("total = packs * per_pack", "left = total - used"),
        numbers={"packs": range(2, 13), "per_pack": range(4, 25), "used": range(3, 81)},
        wordings=(
            "{name} buys {packs} packs of balloons with {per_pack} in each pack. After a party, {used} balloons have popped. How many balloons are left?",
            "Each box holds {per_pack} candles. {name} opens {packs} boxes and lights {used} candles. How many candles are not lit?",
            "{name} has {packs} bags of {per_pack} beads and uses {used} beads for a necklace. How many beads does {name} still have?",
            "How many nails remain if {name} starts with {packs} full boxes of {per_pack} nails and hammers in {used} of them?",
        ),
        distractors=("{friend} is {extra} years old.",),
    ),
    Family(
        "pool_and_share",
        steps=("together = first + second", "share = together / people"),
        numbers={"first": range(6, 61), "second": range(6, 61), "people": range(2, 11)},
        wordings=(
            "{name} brings {first} {bake} and {friend} brings {second}. They share all of them equally among {people} people. How many {bake} does each person get?",
            "There are {first} {fruit} in one bag and {second} in another. {name} puts them all evenly into {people} bowls. How many {fruit} are in each bowl?",
            "How many {keepsake} does each of {people} children get if {name} splits {first} old ones and {second} new ones equally among them?",
            "{name} and {friend} pick {first} and {second} {flower}. They make {people} equal bunches from all of them. How many {flower} are in one bunch?",
        ),
    ),
    Family(
        "more_than_total",
        steps=("second = first + more", "total = first + second"),
        numbers={"first": range(5, 56), "more": range(3, 36)},
        wordings=(
            "{name} picks {first} {flower}. {friend} picks {more} more than {name}. How many {flower} do they pick together?",
            "A bakery sells {first} {bake} in the morning and {more} more than that in the afternoon. How many {bake} does it sell in all?",
            "{friend} has {more} more {keepsake} than {name}, who has {first}. How many {keepsake} do they have altogether?",
            "How many minutes does {name} read on both days, reading {first} minutes on Monday and {more} minutes longer on Tuesday?",
        ),
    ),
    Family(
        "times_total",
        steps=("second = first * times", "total = first + second"),
        numbers={"first": range(3, 41), "times": range(2, 10)},
        wordings=(
            "{name} collects {first} {keepsake}. {friend} collects {times} times as many. How many {keepsake} do they collect together?",
            "On Saturday {first} people visit {name}'s farm. On Sunday {times} times as many come. How many people come on the two days?",
            "{friend} bakes {times} times as many {bake} as {name}. If {name} bakes {first}, how many {bake} do they bake altogether?",
            "How many stairs do {name} and {friend} climb in all, if {name} climbs {first} and {friend} climbs {times} times as many?",
        ),
    ),
    Family(
        "weekly_training",
        steps=("per_week = amount * days", "total = per_week * weeks"),
        numbers={"amount": range(2, 16), "days": range(2, 7), "weeks": range(2, 11)},
        wordings=(
            "{name} runs {amount} miles on {days} days of every week. How many miles does {name} run in {weeks} weeks?",
            "For {weeks} weeks, {name} swims {days} times a week and does {amount} laps each time. How many laps does {name} swim?",
            "How many songs does {name} play in {weeks} weeks with {days} lessons a week and {amount} songs in each lesson?",
            "{name} waters the roof garden {days} times each week and carries up {amount} cans each time. How many cans is that in {weeks} weeks?",
        ),
        distractors=("{name} is {extra} years old.",),
    ),
    Family(
        "saving_weeks",
        steps=("missing = price - saved", "weeks = missing / per_week"),
        numbers={"price": range(30, 141), "saved": range(5, 71), "per_week": range(2, 16)},
        wordings=(
            "{name} wants a guitar that costs {price} dollars and has {saved} dollars. Saving {per_week} dollars a week, how many weeks must {name} save?",
            "A game costs ${price}. {name} already has ${saved} and puts aside ${per_week} each week. After how many weeks can {name} buy the game?",
            "{name} saves ${per_week} every week and starts with ${saved}. How many weeks does it take to reach ${price}?",
            "How many weeks of {per_week} dollars pocket money does {name} need for a tent of {price} dollars, if {saved} dollars are already saved?",
        ),
        distractors=("{friend} is {extra} years old.",),
    ),
    Family(
        "eat_then_share",
        steps=("left = total - eaten", "share = left / people"),
        numbers={"total": range(15, 121), "eaten": range(3, 41), "people": range(2, 11)},
        wordings=(
            "{name} bakes {total} {bake} and drops {eaten}. The rest are shared equally by {people} friends. How many {bake} does each friend get?",
            "From {total} {fruit}, {name} uses {eaten} for juice and divides the others evenly into {people} bags. How many {fruit} are in each bag?",
            "How many {keepsake} does each of {people} cousins get if {name} keeps {eaten} out of {total} and splits the rest equally?",
            "A farmer has {total} eggs. {name} buys {eaten} of them, and {people} neighbors buy the rest in equal parts. How many eggs does each neighbor buy?",
        ),
        distractors=("It is {extra} degrees in the kitchen.",),
    ),
    Family(
        "made_and_boxed",
        steps=("total = per_hour * hours", "groups = total / per_box"),
        numbers={"per_hour": range(4, 31), "hours": range(2, 11), "per_box": range(2, 16)},
        wordings=(
            "A machine makes {per_hour} toys an hour and runs for {hours} hours. {name} packs {per_box} toys in each box. How many boxes does {name} fill?",
            "{name} knits {per_hour} rows an hour, and one patch takes {per_box} rows. How many patches does {name} finish in {hours} hours?",
            "In each of {hours} hours {name} picks {per_hour} {fruit}. A bag holds {per_box}. How many bags can {name} fill?",
            "How many boxes of {per_box} candles does {name} get from {hours} hours of work, making {per_hour} candles per hour?",
        ),
    ),
    Family(
        "half_then_give",
        steps=("half = total / 2", "left = half - given"),
        numbers={"total": range(16, 141), "given": range(3, 41)},
        wordings=(
            "{name} has {total} {fruit}, puts half of them in a pie and gives {given} to {friend}. How many {fruit} are left?",
            "Half of {name}'s {total} {keepsake} get lost. Then {name} trades away {given} more. How many {keepsake} does {name} still have?",
            "A shop has {total} {supply}. It sells half of them in the morning and {given} in the afternoon. How many {supply} does it have in the evening?",
            "How many of {total} {flower} remain in {name}'s garden after half are cut for a wedding and {given} more are sold?",
        ),
        distractors=("{friend} lives {extra} minutes away.",),
    ),
    Family(
        "fewer_second_day",
        steps=("second_day = first - fewer", "total = first + second_day"),
        numbers={"first": range(10, 71), "fewer": range(3, 51)},
        wordings=(
            "{name} sells {first} cups of lemonade on Friday and {fewer} fewer on Saturday. How many cups does {name} sell on both days?",
            "On the first day {name} bikes {first} miles. The second day is {fewer} miles shorter. How many miles does {name} bike in two days?",
            "How many emails does {name} get in two days, with {first} on Monday and {fewer} fewer on Tuesday?",
            "A museum counts {first} visitors today. Tomorrow {name} expects {fewer} fewer than today. How many visitors would that be in the two days?",
        ),
    ),
    Family(
        "quiz_score",
        steps=("points = right * per_answer", "score = points - penalty"),
        numbers={"right": range(4, 26), "per_answer": range(2, 11), "penalty": range(2, 41)},
        wordings=(
            "Each correct reply in a quiz is worth {per_answer} points. {name} gets {right} right but loses {penalty} points for mistakes. What is {name}'s score?",
            "{name} pops {right} balloons at a fair for {per_answer} points each. A foul takes away {penalty} points. How many points does {name} end with?",
            "How many points does {name} have after {right} goals worth {per_answer} points each and penalties of {penalty} points in all?",
            "In a card game {name} wins {right} rounds. A won round gives {per_answer} points, and at the end {penalty} points are taken off. What is the final score?",
        ),
        distractors=("The game lasts {extra} minutes.",),
    ),
    Family(
        "practice_minutes",
        steps=("minutes_per_day = first + second", "total_minutes = minutes_per_day * days"),
        numbers={"first": range(3, 31), "second": range(3, 31), "days": range(2, 13)},
        wordings=(
            "{name} practices piano for {first} minutes and singing for {second} minutes every day. How many minutes does {name} practice in {days} days?",
            "Every day {name} walks {first} minutes to school and {second} minutes back by a different road. How many minutes does {name} walk in {days} school days?",
            "In {days} days, how many minutes does {name} exercise with {first} minutes of stretching and {second} minutes of jogging each day?",
            "{name} feeds the cows in {first} minutes and the hens in {second} minutes each day. How many minutes does feeding take in {days} days?",
        ),
    ),
    Family(
        "fence_around",
        steps=("two_sides = length + width", "perimeter = two_sides * 2"),
        numbers={"length": range(5, 51), "width": range(3, 31)},
        wordings=(
            "{name} builds a fence around a rectangular yard that is {length} feet long and {width} feet wide. How many feet of fence does {name} need?",
            "A rectangular pool measures {length} by {width} meters. {name} walks once around its edge. How many meters does {name} walk?",
            "How many inches of ribbon go once around the edge of {name}'s rectangular picture, which is {length} inches wide and {width} inches high?",
            "What is the perimeter, in yards, of {name}'s rectangular field with sides of {length} yards and {width} yards?",
        ),
        held_out=True,
    ),
    Family(
        "age_riddle",
        steps=("older_age = age * times", "future_age = older_age + years"),
        numbers={"age": range(6, 16), "times": range(2, 7), "years": range(2, 21)},
        wordings=(
            "{name} is {age} years old, and an uncle is {times} times as old. How old will the uncle be in {years} years?",
            "{friend}'s aunt is {times} times as old as {friend}, who is {age}. What will the aunt's age be {years} years from now?",
            "How old will {name}'s neighbor be in {years} years, if {name} is {age} now and the neighbor is {times} times that old now?",
            "A tree in {name}'s yard is {times} times as old as {name}. Today {name} turns {age}. In {years} years, how old will the tree be?",
        ),
        held_out=True,
    ),
)

THREE_STEPS = (
    Family(
        "ticket_sales",
        steps=(
            "adult_money = adults * adult_price",
            "child_money = children * child_price",
            "total_money = adult_money + child_money",
        ),
        numbers={
            "adults": range(2, 21),
            "adult_price": range(6, 21),
            "children": range(2, 31),
            "child_price": range(2, 11),
        },
        wordings=(
            "Tickets cost {adult_price} dollars for adults and {child_price} dollars for children. {adults} adults and {children} children come. How many dollars does {name} collect?",
            "{name} sells {adults} adult tickets at ${adult_price} each and {children} child tickets at ${child_price} each. How much money is that in total?",
            "How much do {adults} adults and {children} children pay for the circus, if an adult pays ${adult_price} and a child pays ${child_price}?",
            "A play is seen by {adults} adults, who pay {adult_price} dollars each, and {children} children, who pay {child_price} dollars each. How many dollars does {name} count at the end?",
        ),
        distractors=("The show lasts {extra} minutes.", "The snack bar has {extra} seats."),
    ),
    Family(
        "two_items_change",
        steps=(
            "books_cost = books * price",
            "total_cost = books_cost + bag",
            "change = paid - total_cost",
        ),
        numbers={
            "books": range(2, 13),
            "price": range(3, 21),
            "bag": range(5, 46),
            "paid": (50, 80, 100, 120, 150, 200),
        },
        wordings=(
            "{name} buys {books} books for {price} dollars each and a bag for {bag} dollars, and pays with {paid} dollars. How much change does {name} get?",
            "A bag costs ${bag} and a book costs ${price}. {name} has ${paid} and buys one bag and {books} books. How many dollars are left?",
            "How many dollars does {name} keep from {paid} dollars after paying {bag} dollars for a bag and {price} dollars for each of {books} books?",
            "{friend} gives {name} ${paid} for {books} books and a bag. The books are ${price} apiece, and the bag is ${bag}. How many dollars should {name} return?",
        ),
        distractors=("One of the books has {extra} chapters.",),
    ),
    Family(
        "earn_and_spend",
        steps=("pay = rate * hours", "money = pay + saved", "left = money - spent"),
        numbers={
            "rate": range(6, 26),
            "hours": range(2, 13),
            "saved": range(10, 91),
            "spent": range(15, 151),
        },
        wordings=(
            "{name} has {saved} dollars and works {hours} hours for {rate} dollars an hour. Then {name} spends {spent} dollars on shoes. How many dollars are left?",
            "After working {hours} hours at ${rate} per hour, {name} adds the pay to savings of ${saved} and buys a jacket for ${spent}. How much money remains?",
            "How much does {name} have after earning ${rate} in each of {hours} hours and paying ${spent} for a phone, having started with ${saved}?",
            "{name} starts the week with {saved} dollars. A job pays {rate} dollars an hour, and {name} works {hours} hours. Bills take {spent} dollars. How many dollars does {name} end with?",
        ),
        distractors=("{name} lives {extra} miles from {friend}.",),
    ),
    Family(
        "harvest_baskets",
        steps=(
            "harvest = rows * per_row",
            "good_ones = harvest - bad",
            "groups = good_ones / per_basket",
        ),
        numbers={
            "rows": range(3, 16),
            "per_row": range(5, 31),
            "bad": range(3, 51),
            "per_basket": range(3, 21),
        },
        wordings=(
            "{name} grows {rows} rows of {per_row} cabbages. Rabbits eat {bad} cabbages, and the rest go into crates of {per_basket}. How many crates does {name} fill?",
            "A field has {rows} rows with {per_row} pumpkins each. {name} throws out {bad} rotten ones and loads {per_basket} on each cart. How many carts are needed?",
            "How many baskets of {per_basket} ripe melons can {name} fill from {rows} rows of {per_row} melons, if {bad} of all the melons are not ripe?",
            "From each of {rows} trees {name} picks {per_row} {fruit}. In all, {bad} are bruised. The others are put in bags of {per_basket}. How many bags are there?",
        ),
        distractors=("The farm is {extra} miles from town.",),
    ),
    Family(
        "together_give",
        steps=("second = first * times", "together = first + second", "left = together - given"),
        numbers={"first": range(5, 61), "times": range(2, 8), "given": range(5, 121)},
        wordings=(
            "{name} has {first} {keepsake}, and {friend} has {times} times as many. Together they give {given} to a school. How many {keepsake} do the two have left?",
            "{name} picks {first} {fruit} and {friend} picks {times} times as many. They sell {given} of all their {fruit}. How many {fruit} remain?",
            "{friend} bakes {times} times as many {bake} as {name}, who bakes {first}. Their guests eat {given} in all. How many {bake} are left over?",
            "How many {flower} are left if {name} plants {first}, {friend} plants {times} times as many, and frost kills {given} of them?",
        ),
    ),
    Family(
        "percent_off",
        steps=(
            "one_percent = price / 100",
            "discount = one_percent * percent",
            "sale_price = price - discount",
        ),
        numbers={"price": range(200, 501, 100), "percent": range(5, 66)},
        wordings=(
            "A bed costs {price} dollars. In a sale {name} gets {percent} percent off. How many dollars does {name} pay?",
            "{name} buys a phone with a discount of {percent}%. The normal price is ${price}. What is the sale price?",
            "How much does {name} pay for a ${price} camera after {percent}% is taken off?",
            "A store lowers the price of {name}'s favorite bike by {percent} percent. It was {price} dollars before. What is the new price in dollars?",
            "With a coupon for {percent}% off, what does {name} pay for a trip that normally costs ${price}?",
        ),
        distractors=("The store has {extra} workers.",),
    ),
    Family(
        "school_buses",
        steps=(
            "students = classes * per_class",
            "people = students + adults",
            "groups = people / seats",
        ),
        numbers={
            "classes": range(2, 11),
            "per_class": range(12, 31),
            "adults": range(4, 31),
            "seats": range(6, 31),
        },
        wordings=(
            "{classes} classes of {per_class} students go on a trip with {adults} adults. Each bus seats {seats} people. How many buses does {name} fill?",
            "A school has {classes} classes with {per_class} students each and {adults} teachers. {name} seats everyone at tables of {seats}. How many tables are filled?",
            "How many boats does {name} fill with {adults} adults and {classes} classes of {per_class} students, if every boat takes {seats} people?",
            "Each of {classes} classes sends {per_class} students to {name}'s camp, and {adults} adults come too. All sleep in cabins for {seats}. How many cabins are full?",
        ),
    ),
    Family(
        "stand_profit",
        steps=("income = sold * price", "profit = income - costs", "share = profit / partners"),
        numbers={
            "sold": range(8, 61),
            "price": range(2, 9),
            "costs": range(5, 71),
            "partners": range(2, 9),
        },
        wordings=(
            "{partners} friends sell {sold} cups of juice for {price} dollars each. They spent {costs} dollars on fruit and share the profit equally. How many dollars does each get?",
            "{name}'s team of {partners} sells {sold} candles at ${price} each. The wax cost ${costs}. If the team splits the profit evenly, what is each member's part?",
            "How much does each of {partners} partners earn if they sell {sold} posters at ${price} apiece, pay ${costs} for printing and divide the rest equally?",
            "{name} sells {sold} {bake} for {price} dollars each and pays {costs} dollars for flour. The remaining money is split equally among {partners} people. How many dollars does each receive?",
        ),
        distractors=("The sale lasts {extra} days.",),
    ),
    Family(
        "reading_plan",
        steps=(
            "done = per_day * days",
            "left = pages - done",
            "more_days = left / new_pace",
        ),
        numbers={
            "per_day": range(5, 26),
            "days": range(2, 11),
            "pages": range(80, 301),
            "new_pace": range(4, 31),
        },
        wordings=(
            "{name}'s book has {pages} pages. {name} reads {per_day} pages a day for {days} days, then {new_pace} pages a day. How many more days does {name} need to finish?",
            "For {days} days {name} types {per_day} pages a day of a report of {pages} pages. After that {name} types {new_pace} pages a day. How many more days does it take?",
            "{name} must paint {pages} tiles and paints {per_day} a day for {days} days. {friend} then paints the rest at {new_pace} a day. How many days does {friend} paint?",
            "How many days does {name} need for the rest of {pages} math exercises at {new_pace} a day, after doing {per_day} a day for the first {days} days?",
        ),
    ),
    Family(
        "tank_level",
        steps=(
            "added = rate * minutes",
            "filled = start + added",
            "space_left = capacity - filled",
        ),
        numbers={
            "rate": range(3, 21),
            "minutes": range(3, 16),
            "start": range(10, 81),
            "capacity": range(100, 401, 10),
        },
        wordings=(
            "A tank of {capacity} liters has {start} liters in it. {name} adds {rate} liters a minute for {minutes} minutes. How many more liters fit in the tank?",
            "{name} pumps {rate} liters per minute into a pool for {minutes} minutes. The pool had {start} liters and can hold {capacity}. How many liters are missing until it is full?",
            "How many liters of space remain in {name}'s barrel of {capacity} liters, if {start} liters were in it and rain adds {rate} liters a minute for {minutes} minutes?",
            "A truck with room for {capacity} bricks has {start} on it. {name} loads {rate} bricks a minute for {minutes} minutes. How many more bricks can the truck take?",
        ),
        distractors=("It is {extra} degrees outside.",),
    ),
    Family(
        "slices_left",
        steps=(
            "slices = pizzas * per_pizza",
            "eaten = guests * each",
            "slices_left = slices - eaten",
        ),
        numbers={
            "pizzas": range(3, 25),
            "per_pizza": range(4, 17),
            "guests": range(4, 31),
            "each": range(2, 7),
        },
        wordings=(
            "{name} orders {pizzas} pizzas with {per_pizza} slices each. {guests} guests eat {each} slices each. How many slices are left?",
            "At {name}'s party, {guests} children eat {each} slices of cake each. There were {pizzas} cakes, cut into {per_pizza} slices each. How many slices remain?",
            "How many slices of bread are left if {name} cuts {pizzas} loaves into {per_pizza} slices each and {guests} people eat {each} slices each?",
            "A cook cuts each of {pizzas} pies into {per_pizza} slices. Then {guests} diners take {each} slices apiece. How many slices are left for {name}?",
        ),
        distractors=("{name} is {extra} years old.",),
    ),
    Family(
        "average_of_three",
        steps=("first_two = first + second", "total = first_two + third", "average = total / 3"),
        numbers={"first": range(10, 100), "second": range(10, 100), "third": range(10, 100)},
        wordings=(
            "{name} scores {first}, {second} and {third} on three tests. What is {name}'s average score?",
            "On three nights the temperature is {first}, {second} and {third} degrees. What average temperature does {name} write down?",
            "What is the mean weight, in pounds, of {name}'s three dogs, which weigh {first}, {second} and {third} pounds?",
            "{name} jumps {first} times in the first minute, {second} in the second and {third} in the third. How many jumps per minute is that on average?",
        ),
        held_out=True,
    ),
    Family(
        "fuel_cost",
        steps=(
            "round_trip = one_way * 2",
            "gallons = round_trip / per_gallon",
            "fuel_cost = gallons * price",
        ),
        numbers={"one_way": range(15, 181, 5), "per_gallon": range(5, 41), "price": range(2, 8)},
        wordings=(
            "{name}'s car goes {per_gallon} miles on a gallon of gas, which costs {price} dollars. How many dollars of gas does a drive to a beach {one_way} miles away and back take?",
            "A lake is {one_way} miles from {name}'s home. Gas costs ${price} a gallon, and the van drives {per_gallon} miles per gallon. How much does gas for the trip there and back cost?",
            "How much does {name} pay for gas to visit {friend}, who lives {one_way} miles away, and drive home, at {per_gallon} miles per gallon and ${price} per gallon?",
            "{name} drives {one_way} miles to a wedding and the same way home. The car needs one gallon for {per_gallon} miles, and a gallon is ${price}. What does the fuel cost?",
        ),
        held_out=True,
    ),
)

FOUR_STEPS = (
    Family(
        "two_kinds_change",
        steps=(
            "fruit_cost = fruits * fruit_price",
            "bread_cost = loaves * bread_price",
            "total_cost = fruit_cost + bread_cost",
            "change = paid - total_cost",
        ),
        numbers={
            "fruits": range(3, 21),
            "fruit_price": range(2, 7),
            "loaves": range(2, 11),
            "bread_price": range(3, 10),
            "paid": (50, 80, 100, 120, 150, 200),
        },
        wordings=(
            "{name} pays with {paid} dollars for {fruits} {fruit} at {fruit_price} dollars each and {loaves} loaves of bread at {bread_price} dollars each. How much change does {name} get?",
            "One loaf of bread costs ${bread_price}, and {fruit} are ${fruit_price} each. {name} buys {loaves} loaves of bread and {fruits} {fruit} and pays with ${paid}. How many dollars does {name} get back?",
            "How many dollars are left from ${paid} after {name} pays for {fruits} {fruit} at ${fruit_price} apiece and {loaves} loaves of bread at ${bread_price} apiece?",
            "{name} goes to market with {paid} dollars for {loaves} loaves of bread and {fruits} {fruit}. Each loaf is {bread_price} dollars. The {fruit} are {fruit_price} dollars each. How much money does {name} bring home?",
        ),
        distractors=("The market has {extra} stalls.",),
    ),
    Family(
        "three_collectors",
        steps=(
            "second = first * times",
            "third = second - fewer",
            "first_two = first + second",
            "total = first_two + third",
        ),
        numbers={"first": range(5, 51), "times": range(2, 7), "fewer": range(3, 91)},
        wordings=(
            "{name} has {first} {keepsake}. {friend} has {times} times as many as {name}. A cousin has {fewer} fewer than {friend}. How many {keepsake} do all three have?",
            "A red box holds {first} {supply}, a blue box holds {times} times as many, and a green box holds {fewer} fewer than the blue one. How many {supply} does {name} find in all?",
            "On Monday {name} sells {first} {bake}, on Tuesday {times} times as many, and on Wednesday {fewer} fewer than on Tuesday. How many {bake} is that in three days?",
            "How many {flower} do three gardens have, if {name}'s has {first}, {friend}'s has {times} times as many, and the park has {fewer} fewer than {friend}'s?",
        ),
    ),
    Family(
        "bakery_boxes",
        steps=(
            "total = trays * per_tray",
            "for_sale = total - kept",
            "packs = for_sale / per_box",
            "income = packs * price",
        ),
        numbers={
            "trays": range(3, 13),
            "per_tray": range(6, 31),
            "kept": range(3, 41),
            "per_box": range(4, 17),
            "price": range(3, 16),
        },
        wordings=(
            "{name} bakes {trays} trays of {per_tray} {bake} and keeps {kept}. The rest are sold in boxes of {per_box} for {price} dollars a box. How many dollars does {name} earn?",
            "A box of {per_box} {bake} sells for ${price}. {name} makes {trays} trays with {per_tray} on each, eats {kept} and sells the rest in boxes. How much money comes in?",
            "How many dollars does {name} make by selling {bake} in boxes of {per_box} at ${price} per box, having baked {trays} trays of {per_tray} and given away {kept}?",
            "From each of {trays} trees {name} gets {per_tray} {fruit}. After {kept} are eaten, the others are packed {per_box} to a bag and sold at {price} dollars a bag. How many dollars does {name} get?",
        ),
        distractors=("{name} gets up {extra} minutes before sunrise.",),
    ),
    Family(
        "weekly_budget",
        steps=(
            "daily_pay = rate * hours",
            "weekly_pay = daily_pay * days",
            "unspent = weekly_pay - spent",
            "savings = unspent + saved",
        ),
        numbers={
            "rate": range(6, 26),
            "hours": range(2, 9),
            "days": range(2, 7),
            "spent": range(40, 301, 5),
            "saved": range(10, 151, 5),
        },
        wordings=(
            "{name} works {hours} hours a day for {days} days at {rate} dollars an hour, spends {spent} dollars of the pay and adds the rest to savings of {saved} dollars. How many dollars are the savings now?",
            "With ${saved} saved, {name} works {days} days of {hours} hours at ${rate} per hour and then spends ${spent}. How much money does {name} have now?",
            "How many dollars does {name} have after starting with ${saved}, working {days} days for {hours} hours a day at ${rate} an hour and paying ${spent} for rent?",
            "A job pays {name} ${rate} an hour for {hours} hours on each of {days} days. {name} had ${saved} and pays bills of ${spent}. How many dollars does {name} have in the end?",
        ),
    ),
    Family(
        "road_trip",
        steps=(
            "first_miles = first_speed * first_hours",
            "second_miles = second_speed * second_hours",
            "driven = first_miles + second_miles",
            "miles_left = distance - driven",
        ),
        numbers={
            "first_speed": range(20, 71, 2),
            "first_hours": range(2, 6),
            "second_speed": range(20, 61, 2),
            "second_hours": range(2, 5),
            "distance": range(150, 601, 10),
        },
        wordings=(
            "{name} drives {first_hours} hours at {first_speed} miles per hour, then {second_hours} hours at {second_speed} miles per hour. The whole trip is {distance} miles. How many miles are left?",
            "A city is {distance} miles away. {name} rides {first_hours} hours at {first_speed} miles an hour and, after lunch, {second_hours} hours at {second_speed} miles an hour. How far is the city now, in miles?",
            "How many of {distance} miles must {name} still cover after {first_hours} hours at {first_speed} miles per hour and {second_hours} hours at {second_speed} miles per hour?",
            "A train makes {first_speed} miles each hour for {first_hours} hours and then {second_speed} miles each hour for {second_hours} hours. {name}'s stop is {distance} miles from the start. How many miles remain?",
        ),
        distractors=("Lunch takes {extra} minutes.",),
    ),
    Family(
        "party_supplies",
        steps=(
            "needed = guests * each",
            "to_buy = needed - have",
            "packs = to_buy / per_pack",
            "cost = packs * price",
        ),
        numbers={
            "guests": range(6, 41),
            "each": range(2, 9),
            "have": range(4, 41),
            "per_pack": range(3, 17),
            "price": range(2, 13),
        },
        wordings=(
            "{name} wants {each} cups for each of {guests} guests and has {have} cups. Cups come in packs of {per_pack} for {price} dollars. How many dollars does {name} spend on cups?",
            "A pack of {per_pack} balloons costs ${price}. {name} has {have} balloons and needs {each} for each of {guests} tables. How much do the missing balloons cost?",
            "How much must {name} pay to give {guests} children {each} {supply} each, if {have} are already there and a pack of {per_pack} costs ${price}?",
            "{guests} players need {each} water bottles each. {name} already has {have} and buys the rest in boxes of {per_pack} at {price} dollars a box. How many dollars does {name} pay?",
        ),
    ),
    Family(
        "library_rooms",
        steps=(
            "first_total = shelves * per_shelf",
            "new_total = first_total + gift",
            "remaining = new_total - lent",
            "per_room = remaining / rooms",
        ),
        numbers={
            "shelves": range(3, 16),
            "per_shelf": range(8, 31),
            "gift": range(5, 61),
            "lent": range(5, 61),
            "rooms": range(2, 11),
        },
        wordings=(
            "A library has {shelves} shelves with {per_shelf} books each. It gets {gift} new books and lends out {lent}. {name} spreads the rest evenly over {rooms} rooms. How many books are in each room?",
            "{name} owns {shelves} boxes of {per_shelf} cards, buys {gift} more and sells {lent}. The remaining cards go equally into {rooms} albums. How many cards are in one album?",
            "How many plants stand in each of {rooms} greenhouses if {name} grows {shelves} rows of {per_shelf}, gets {gift} more, sells {lent} and divides the rest equally?",
            "{shelves} trucks bring {per_shelf} chairs each to {name}'s school, which had {gift} chairs. Then {lent} are thrown out and the rest shared equally by {rooms} classrooms. How many chairs does each classroom get?",
        ),
        distractors=("{name} is {extra} years old.",),
    ),
    Family(
        "fundraiser",
        steps=(
            "wash_money = cars * wash_price",
            "cake_money = cakes * cake_price",
            "raised = wash_money + cake_money",
            "share = raised / classes",
        ),
        numbers={
            "cars": range(5, 31),
            "wash_price": range(3, 13),
            "cakes": range(4, 31),
            "cake_price": range(2, 13),
            "classes": range(2, 11),
        },
        wordings=(
            "{name}'s school washes {cars} cars for {wash_price} dollars each and sells {cakes} cakes for {cake_price} dollars each. {classes} classes share the money equally. How many dollars does each class get?",
            "At a fair, {cars} car washes bring ${wash_price} each and {cakes} cakes bring ${cake_price} each. {name} splits the money evenly between {classes} clubs. How much does each club get?",
            "How many dollars go to each of {classes} teams if {name} divides equally the money from {cars} car washes at {wash_price} dollars and {cakes} cakes at {cake_price} dollars?",
            "A cake costs ${cake_price} and a car wash costs ${wash_price}. {name}'s group sells {cakes} cakes, washes {cars} cars and gives equal parts of the money to {classes} charities. How much does each charity get?",
        ),
        distractors=("It is {extra} degrees outside.",),
    ),
    Family(
        "training_goal",
        steps=(
            "first_week = per_day * days",
            "second_week = first_week + more",
            "both_weeks = first_week + second_week",
            "left = goal - both_weeks",
        ),
        numbers={
            "per_day": range(4, 26),
            "days": range(3, 8),
            "more": range(3, 41),
            "goal": range(80, 451, 10),
        },
        wordings=(
            "{name} wants to bike {goal} miles. In week one {name} bikes {per_day} miles on each of {days} days, and in week two {more} miles more than in week one. How many miles are left?",
            "The goal is {goal} push-ups. {name} does {per_day} a day for {days} days in the first week and {more} more than that in the second week. How many push-ups are still to do?",
            "How many of {goal} bricks must {name} still lay after {days} days of {per_day} bricks in the first week and a second week with {more} bricks more than the first?",
            "Last week {name} wrote {per_day} lines on each of {days} days. This week {name} wrote {more} lines more than last week. The play needs {goal} lines. How many lines are missing?",
        ),
    ),
    Family(
        "legs_in_barn",
        steps=(
            "goats_left = goats - sold",
            "goat_legs = goats_left * 4",
            "hen_legs = hens * 2",
            "legs = goat_legs + hen_legs",
        ),
        numbers={"goats": range(10, 61), "sold": range(3, 51), "hens": range(4, 61)},
        wordings=(
            "A barn has {goats} goats and {hens} hens. {name} sells {sold} goats. How many legs do the animals in the barn have now?",
            "{name} owns {hens} hens and {goats} goats, but {sold} of the goats run away. How many animal legs are left on the farm?",
            "How many legs are in {name}'s field, where {hens} hens and {goats} goats were and {sold} goats have left?",
            "After giving {sold} of {goats} goats to {friend}, {name} counts the legs of the remaining goats and of {hens} hens. How many legs is that?",
        ),
        held_out=True,
    ),
    Family(
        "paint_wall",
        steps=(
            "full_area = length * height",
            "area_left = full_area - window",
            "packs = area_left / per_can",
            "total_cost = packs * price",
        ),
        numbers={
            "length": range(8, 41),
            "height": range(6, 16),
            "window": range(6, 61),
            "per_can": range(10, 61),
            "price": range(5, 31),
        },
        wordings=(
            "A wall is {length} feet long and {height} feet high, with a window of {window} square feet. One can of paint covers {per_can} square feet and costs {price} dollars. What does painting the wall cost {name}, in dollars?",
            "{name} paints a wall of {length} by {height} feet, but not its door of {window} square feet. A can for {per_can} square feet costs ${price}. How much is the paint?",
            "How many dollars does {name} pay for paint at ${price} a can, if a can covers {per_can} square feet and the wall is {length} by {height} feet with {window} square feet of glass?",
            "Grass seed costs ${price} a bag, and a bag covers {per_can} square feet. {name}'s yard is {length} feet by {height} feet, of which a pond takes up {window} square feet. How much does seed for the rest cost?",
        ),
        held_out=True,
    ),
)

FAMILIES: tuple[Family, ...] = ONE_STEP + TWO_STEPS + THREE_STEPS + FOUR_STEPS
