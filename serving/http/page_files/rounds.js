// Rounds of an answer: what became of each token, and the counts that follow.
//
// A round is {tokens, texts, accepted, drafts}: the texts of its tokens, the first `accepted` of which were
// drafts, and the texts of all its drafts. The first entry of an answer is the token of the prompt's pass.

export function fateOf(round, index) {
  if (index < round.accepted) return "accepted";
  if (round.drafts.length === 0) return "plain";
  return round.accepted === round.drafts.length ? "bonus" : "correction";
}

export class Counts {
  constructor() {
    this.tokens = 0;
    this.entries = 0;
    this.drafted = 0;
    this.accepted = 0;
    this.byPosition = [];
    this.fewest = Infinity;
  }

  add(round) {
    if (this.entries) this.fewest = Math.min(this.fewest, round.drafts.length);
    this.tokens += round.tokens;
    this.entries += 1;
    this.drafted += round.drafts.length;
    this.accepted += round.accepted;
    while (this.byPosition.length < round.drafts.length) this.byPosition.push(0);
    for (let i = 0; i < round.accepted; i++) this.byPosition[i] += 1;
  }

  get rounds() {
    return Math.max(0, this.entries - 1);
  }

  // K: the drafts of these rounds, which the server may choose by load.
  get drafts() {
    const most = this.byPosition.length;
    return this.fewest < most ? `${this.fewest} to ${most}` : String(most);
  }

  // AL: tokens per round.
  get acceptanceLength() {
    return this.rounds ? (this.tokens - 1) / this.rounds : null;
  }

  // Per position, the share of all rounds in which its draft became output.
  get rates() {
    return this.byPosition.map((count) => (this.rounds ? count / this.rounds : 0));
  }
}

// A token with its spaces and line ends visible.
export function visible(text) {
  if (text === "") return "∅";
  return text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥");
}
