"use strict";
/* The rollout browser: a filtered, sorted list of which only the visible rows are in the document, and beside it one
   rollout with its tokens, seeds, command and group. */

const ROW_HEIGHT = 26;
const FINISH = ["stop", "length", "error"];
const SHOWN_IN_GROUP = 200; // tokens of a member; the whole completion is one click away
const SHOWN = 2000; // tokens of the chosen rollout, until all are asked for
const COLUMNS = [
  ["step", "step", (r) => (i) => r.step[i]],
  ["group", "group", (r) => (i) => r.group[i]],
  ["#", "sample within the group", (r) => (i) => r.sample[i]],
  ["reward", "reward", (r) => (i) => r.reward[i]],
  ["adv.", "advantage", (r) => (i) => r.advantage[i]],
  ["tokens", "length in tokens", (r) => (i) => r.length[i]],
  ["end", "how it ended", (r) => (i) => r.finish[i]],
  ["completion", "", null],
];
const COLORS = {
  logprob: "log-probability", ratio: "ratio", clipped: "clipped", advantage: "advantage", none: "nothing",
};
const VERDICTS = {
  "": (r) => () => true,
  "rewarded": (r) => (i) => r.reward[i] > 0,
  "not rewarded": (r) => (i) => r.reward[i] <= 0,
  "unscored": (r) => (i) => Number.isNaN(r.reward[i]),
  "truncated": (r) => (i) => r.finish[i] === 1,
  "failed": (r) => (i) => r.finish[i] === 2,
  "no signal": (r) => (i) => r.advantage[i] === 0,
  "with signal": (r) => (i) => r.advantage[i] > 0 || r.advantage[i] < 0,
  "clipped": (r) => (i) => r.anyClipped(i),
};

/** The rollouts of one run: row columns at once, token columns when `tokens` is awaited. */
class Record {
  constructor(run) {
    const { count, parts, axes, omitted_steps } = run.rollouts;
    Object.assign(this, { count, parts, axes, omitted_steps, replay: run.replay, about: run.rollouts, trainer: null });
  }

  async load() {
    const { columns, texts } = this.about;
    const names = Object.keys(columns);
    const arrays = await Promise.all(names.map((name) => blockNumbers(columns[name])));
    names.forEach((name, i) => (this[name] = arrays[i]));
    const kinds = Object.keys(texts);
    const found = await Promise.all(kinds.map((name) => blockTexts(texts[name])));
    this.text = Object.fromEntries(kinds.map((name, i) => [name, found[i]]));
    this.step = this.group.map((g) => this.group_step[g]);
    this.offset = new Uint32Array(this.count + 1);
    for (let i = 0; i < this.count; i++) this.offset[i + 1] = this.offset[i] + this.length[i];
    this.spread = 0;
    for (const value of this.advantage) this.spread = Math.max(this.spread, Math.abs(value) || 0);
    this.tokensLoaded = this.loadTokens();
    return this;
  }

  async loadTokens() {
    const { vocabulary, tokens, logprobs, difference } = this.about;
    [this.vocabulary, this.tokens, this.logprobs, this.difference] = await Promise.all([
      blockJson(vocabulary), blockNumbers(tokens), blockNumbers(logprobs), blockNumbers(difference),
    ]);
    const bits = new this.difference.constructor(this.logprobs.buffer);
    for (let i = 0; i < this.difference.length; i++) this.difference[i] ^= bits[i];
    this.trainer = new this.logprobs.constructor(this.difference.buffer);
  }

  /** Everything known of token t of rollout i. */
  token(i, t) {
    const at = this.offset[i] + t;
    const [id, text] = this.vocabulary[this.tokens[at]];
    const trainer = this.trained[i] ? this.trainer[at] : NaN;
    const ratio = Math.exp(trainer - this.logprobs[at]);
    const clipped = this.trained[i] ? this.clipping(i, this.axes.ratio === "sequence" ? this.rowRatio(i) : ratio) : "";
    return { id, text: text ?? `[${id}]`, sampler: this.logprobs[at], trainer, ratio, clipped, advantage: this.advantage[i] };
  }

  /** The ratio of the whole completion; kept for the row that was asked last, since each of its tokens asks. */
  rowRatio(i) {
    if (this.lastRatio?.row !== i) {
      let sum = 0;
      for (let at = this.offset[i]; at < this.offset[i + 1]; at++) sum += this.trainer[at] - this.logprobs[at];
      this.lastRatio = { row: i, value: Math.exp(sum / Math.max(1, this.length[i])) };
    }
    return this.lastRatio.value;
  }

  /** Which bound a ratio is beyond, as in post/grpo.py: only where the advantage pushes it there. */
  clipping(i, ratio) {
    const { clip, clip_low, clip_high, dual_clip } = this.axes;
    const advantage = this.advantage[i];
    if (!clip || !advantage) return "";
    const falls = clip === "cispo" || advantage < 0;
    const rises = clip === "cispo" || advantage > 0;
    if ((rises && ratio > 1 + clip_high) || (clip === "dual" && falls && ratio > dual_clip)) return "high";
    return falls && ratio < 1 - clip_low ? "low" : "";
  }

  anyClipped(i) {
    if (!this.trainer || !this.trained[i] || !this.advantage[i]) return false;
    if (this.axes.ratio === "sequence") return this.clipping(i, this.rowRatio(i)) !== "";
    let [least, most] = [Infinity, -Infinity]; // if any is clipped, one of these is
    for (let at = this.offset[i]; at < this.offset[i + 1]; at++) {
      const gap = this.trainer[at] - this.logprobs[at];
      least = Math.min(least, gap);
      most = Math.max(most, gap);
    }
    return this.clipping(i, Math.exp(least)) !== "" || this.clipping(i, Math.exp(most)) !== "";
  }

  /** Rows of the same group, in order. */
  members(i) {
    const found = [];
    for (let j = i; j >= 0 && this.group[j] === this.group[i]; j--) found.unshift(j);
    for (let j = i + 1; j < this.count && this.group[j] === this.group[i]; j++) found.push(j);
    return found;
  }
}

class Browser {
  constructor(runs) {
    this.records = new Map();
    this.runs = runs.filter((run) => run.rollouts);
    this.rows = new Uint32Array(0);
    this.chosen = -1; // position in rows
    this.sort = null;
    this.coloring = "logprob";
    this.now = -1; // token
    this.node = make("div", { className: "browser" }, this.drawLeft(), this.drawDetail());
    this.ready = this.choose(0);
  }

  // The list

  drawLeft() {
    const field = (name, label, properties) => {
      this[name] = make("input", { "aria-label": `${label}`, ...properties });
      this[name].addEventListener("input", () => this.filter());
      return this[name];
    };
    const number = (name, label, placeholder) => field(name, label, { type: "number", step: "any", placeholder });
    const choice = (name, label, options, act) => {
      this[name] = make("select", { "aria-label": label }, ...options.map(([value, text]) => make("option", { value }, text)));
      this[name].addEventListener("change", act);
      return this[name];
    };
    const pair = (text, a, b) => make("label", {}, text, a, "–", b);
    const verdicts = Object.keys(VERDICTS).map((name) => [name, name || "any verdict"]);
    const filters = make("div", { className: "filters", role: "search" },
      this.runs.length > 1 ? choice("run", "run", this.runs.map((run, i) => [i, run.name]), () => this.choose(Number(this.run.value))) : null,
      field("query", "text in prompt, completion or answer", { type: "search", placeholder: "text  ( / )" }),
      choice("verdict", "verdict", verdicts, () => this.filter()),
      pair("step", number("step_low", "first step", "first"), number("step_high", "last step", "last")),
      pair("reward", number("reward_low", "least reward", "min"), number("reward_high", "greatest reward", "max")),
      pair("tokens", number("length_low", "least length", "min"), number("length_high", "greatest length", "max")),
      make("label", {}, "group", field("groupName", "group", { type: "search", placeholder: "name", style: "width: 8em" })),
    );
    this.clear = make("button", { type: "button" }, "clear filters");
    this.clear.addEventListener("click", () => this.setFilter({}));
    this.counted = make("span", { role: "status" }, "opening …");
    const count = make("p", { className: "count" }, this.counted, this.clear);
    const headings = make("div", { className: "row headings" }, ...COLUMNS.map(([name, title, value]) => {
      const node = make("button", { type: "button", title: value ? `sort by ${title}` : "" }, name);
      if (value) node.addEventListener("click", () => this.sortBy(name));
      return make("span", value && name !== "group" && name !== "end" ? { className: "number" } : {}, node);
    }));
    this.space = make("div", { role: "presentation" });
    this.window = make("div", { className: "window", tabIndex: 0, role: "listbox", "aria-label": "rollouts" }, this.space);
    this.window.addEventListener("scroll", () => this.drawRows());
    this.window.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.select(Number(row.dataset.position));
    });
    new ResizeObserver(() => this.drawRows()).observe(this.window);
    const list = make("div", { className: "list card" }, headings, this.window);
    return make("div", { className: "left" }, filters, count, list);
  }

  async choose(number) {
    if (!this.records.has(number)) {
      this.counted.textContent = "opening …";
      this.records.set(number, new Record(this.runs[number]).load());
    }
    this.record = await this.records.get(number);
    this.filter();
    ready("rollouts");
    await this.record.tokensLoaded;
    if (this.chosen >= 0) this.drawRollout();
    ready("tokens");
  }

  /** Shows what fits and nothing else; `run` is a run's name, else the run stays. */
  async setFilter({ run, step, verdict, group } = {}) {
    await this.ready;
    const number = this.runs.findIndex(({ name }) => name === run);
    if (this.run && number >= 0 && Number(this.run.value) !== number) {
      this.run.value = number;
      await this.choose(number);
    }
    for (const input of this.node.querySelectorAll(".filters input")) input.value = "";
    if (step) [this.step_low.value, this.step_high.value] = step;
    this.verdict.value = verdict ?? "";
    this.groupName.value = group ?? "";
    this.filter();
    this.focusList();
  }

  filter() {
    const r = this.record;
    if (!r) return;
    const kept = this.rows[this.chosen];
    const bound = (input, otherwise) => (input.value === "" || Number.isNaN(input.valueAsNumber) ? otherwise : input.valueAsNumber);
    const between = (column, low, high) => {
      const [least, most] = [bound(low, -Infinity), bound(high, Infinity)];
      if (least === -Infinity && most === Infinity) return null;
      return (i) => column[i] >= least && column[i] <= most;
    };
    const tests = [
      between(r.step, this.step_low, this.step_high),
      between(r.reward, this.reward_low, this.reward_high),
      between(r.length, this.length_low, this.length_high),
      this.verdict.value ? VERDICTS[this.verdict.value](r) : null,
      this.groupTest(r),
      this.textTest(r),
    ].filter(Boolean);
    const found = new Uint32Array(r.count);
    let count = 0;
    for (let i = 0; i < r.count; i++) {
      if (tests.every((test) => test(i))) found[count++] = i;
    }
    this.rows = found.slice(0, count);
    if (this.sort) this.applySort();
    const left = r.omitted_steps ? `; ${r.omitted_steps} recorded steps are not in this file (the run is too large)` : "";
    this.counted.textContent = `${count.toLocaleString("en")} of ${r.count.toLocaleString("en")} rollouts${left}`;
    this.space.style.height = `${count * ROW_HEIGHT}px`;
    const again = kept === undefined ? -1 : this.rows.indexOf(kept);
    if (again < 0) this.window.scrollTop = 0;
    this.select(count ? Math.max(0, again) : -1);
  }

  groupTest(r) {
    const wanted = this.groupName.value.trim().toLowerCase();
    if (!wanted) return null;
    const fits = r.text.group_id.table.map((name) => (wanted.includes("#") ? name.toLowerCase() === wanted : name.toLowerCase().includes(wanted)));
    return (i) => fits[r.text.group_id.rows[r.group[i]]];
  }

  textTest(r) {
    const wanted = this.query.value.toLowerCase();
    if (!wanted) return null;
    const holds = (texts) => texts.table.map((text) => text !== null && text.toLowerCase().includes(wanted));
    const { completion, answer, prompt } = r.text;
    const [a, b, c] = [completion, answer, prompt].map(holds);
    return (i) => a[completion.rows[i]] || b[answer.rows[i]] || c[prompt.rows[r.group[i]]];
  }

  sortBy(name) {
    const down = this.sort?.name === name ? !this.sort.down : name === "reward" || name === "tokens";
    this.sort = { name, down };
    this.filter();
  }

  applySort() {
    const value = COLUMNS.find(([name]) => name === this.sort.name)[2](this.record);
    const sign = this.sort.down ? -1 : 1;
    this.rows.sort((i, j) => {
      const [a, b] = [value(i), value(j)];
      if (a === b) return i - j;
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b) || i - j;
      return a < b ? -sign : sign;
    });
  }

  drawRows() {
    const first = Math.max(0, Math.floor(this.window.scrollTop / ROW_HEIGHT) - 8);
    const last = Math.min(this.rows.length, first + Math.ceil(this.window.clientHeight / ROW_HEIGHT) + 16);
    const nodes = [];
    for (let position = first; position < last; position++) nodes.push(this.drawRow(position));
    this.space.replaceChildren(...nodes);
    this.window.setAttribute("aria-activedescendant", this.chosen >= 0 ? `rollout-${this.chosen}` : "");
  }

  drawRow(position) {
    const [r, i] = [this.record, this.rows[position]];
    const number = (value, digits) => make("span", { className: "number" }, short(value, digits));
    const node = make("div", {
      className: "row", role: "option", id: `rollout-${position}`, "aria-selected": position === this.chosen,
      "aria-setsize": this.rows.length, "aria-posinset": position + 1,
    },
      number(r.step[i]), make("span", {}, r.text.group_id.at(r.group[i])), number(r.sample[i]), number(r.reward[i]),
      number(r.advantage[i]), number(r.length[i]), make("span", {}, FINISH[r.finish[i]]),
      make("span", {}, r.text.completion.at(i).slice(0, 200).replaceAll("\n", " ⏎ ")));
    node.dataset.position = position;
    node.style.top = `${position * ROW_HEIGHT}px`;
    return node;
  }

  select(position) {
    this.chosen = position;
    this.now = -1;
    this.shown = SHOWN;
    if (position >= 0) {
      const [top, height] = [position * ROW_HEIGHT, this.window.clientHeight];
      if (top < this.window.scrollTop) this.window.scrollTop = top;
      else if (top + ROW_HEIGHT > this.window.scrollTop + height) this.window.scrollTop = top + ROW_HEIGHT - height;
    }
    this.drawRows();
    this.drawRollout();
  }

  focusList() {
    this.window.focus();
  }

  /** Returns whether the key meant something. */
  onKey(event) {
    const many = Math.max(1, Math.floor(this.window.clientHeight / ROW_HEIGHT) - 1);
    const moves = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: many, PageUp: -many, Home: -Infinity, End: Infinity };
    if (event.key in moves && this.rows.length) {
      this.select(Math.min(this.rows.length - 1, Math.max(0, this.chosen + moves[event.key])));
      this.focusList();
    } else if (event.key === "/") this.query.focus();
    else if (event.key === "c") this.colorBy(Object.keys(COLORS)[(Object.keys(COLORS).indexOf(this.coloring) + 1) % 5]);
    else if (event.key === "g" && this.chosen >= 0) this.onlyGroup();
    else if (event.key === "ArrowRight" || event.key === "ArrowLeft") this.moveToken(event.key === "ArrowRight" ? 1 : -1);
    else return false;
    return true;
  }

  onlyGroup() {
    const i = this.rows[this.chosen];
    const step = this.record.step[i];
    if (this.groupName.value) this.setFilter({});
    else this.setFilter({ step: [step, step], group: this.record.text.group_id.at(this.record.group[i]) });
  }

  // One rollout

  drawDetail() {
    this.color = make("select", { "aria-label": "colour tokens by" }, ...Object.entries(COLORS).map(([value, text]) => make("option", { value }, text)));
    this.color.addEventListener("change", () => this.colorBy(this.color.value));
    this.detail = make("div", { className: "detail card", tabIndex: 0, "aria-label": "the chosen rollout" });
    this.legend = make("div", { className: "legend" });
    this.readout = make("div", { className: "readout", role: "status" });
    this.detail.addEventListener("mouseover", (event) => {
      const token = event.target.closest(".tokens.whole span");
      if (token) this.setToken(Number(token.dataset.t));
    });
    return this.detail;
  }

  drawRollout() {
    const r = this.record;
    if (this.chosen < 0) {
      this.detail.replaceChildren(make("p", { className: "loading" }, "No rollout fits the filter."));
      return;
    }
    const i = this.rows[this.chosen];
    const group = r.text.group_id.at(r.group[i]);
    const step = r.step[i];
    this.tokensNode = this.drawTokens(i, this.shown, true);
    this.membersNode = make("div", { className: "members" }, ...r.members(i).map((j) => this.drawMember(j, j === i)));
    this.detail.replaceChildren(
      make("h2", {}, `Step ${step}, group ${group}, sample ${r.sample[i]}`),
      this.drawFacts(i),
      make("h3", {}, "Prompt"), make("div", { className: "prompt" }, r.text.prompt.at(r.group[i])),
      make("h3", {}, "Completion"), make("div", { className: "legend" }, make("label", {}, "colour by ", this.color), this.legend),
      this.tokensNode, this.readout,
      make("h3", {}, "Compute this step again"), drawCommand(`${r.replay} ${step}:${step}`),
      make("h3", {}, `Group ${group}: all ${r.members(i).length} samples`), this.membersNode,
    );
    this.drawLegend();
    this.setToken(-1);
  }

  drawFacts(i) {
    const [r, text] = [this.record, this.record.text];
    const facts = [
      ["reward", plain(r.reward[i])], ["advantage", Number.isNaN(r.advantage[i]) ? "not kept (replay rebuilds it)" : plain(r.advantage[i])],
      ["answer", text.answer.at(i) ?? "none found"], ["end", `${FINISH[r.finish[i]]}, ${r.length[i]} tokens`],
      ["seed key", String(r.seed_key[i])], ["revision", text.revision.at(i) + (r.lag[i] ? ` (${r.lag[i]} steps old)` : "")],
    ];
    if (text.reason.at(i) !== null) facts.push(["unscored", text.reason.at(i)]);
    if (text.error.at(i) !== null) facts.push(["error", text.error.at(i)]);
    r.parts.forEach((name, k) => Number.isNaN(r[`part ${k}`][i]) || facts.push([`part ${name}`, plain(r[`part ${k}`][i])]));
    const row = text.row.at(r.group[i]);
    const named = (tag, words, value) => make(tag, String(value).length > 24 ? { className: "long" } : {}, words);
    if (row && row !== "{}") facts.push(["task row", row]);
    if (text.extra.at(i) !== null) facts.push(["logged", text.extra.at(i)]);
    return make("dl", { className: "facts" }, ...facts.flatMap(([name, value]) => [named("dt", name, value), named("dd", value, value)]));
  }

  drawTokens(i, limit, whole) {
    const r = this.record;
    if (!r.trainer) return make("div", { className: "tokens" }, r.text.completion.at(i));
    const node = make("div", { className: whole ? "tokens whole" : "tokens" });
    for (let t = 0; t < Math.min(limit, r.length[i]); t++) {
      const token = r.token(i, t);
      const span = make("span", {}, token.text.replaceAll("\n", "⏎\n"));
      span.dataset.t = t;
      this.paint(span, token, r.trained[i]);
      node.append(span);
    }
    if (r.length[i] > limit) node.append(` … ${r.length[i] - limit} more tokens `);
    if (r.length[i] > limit && whole) {
      const button = make("button", { type: "button" }, "show all");
      button.addEventListener("click", () => {
        this.shown = Infinity;
        this.drawRollout();
      });
      node.append(button);
    }
    return node;
  }

  paint(span, token, trained) {
    const [hue, weight] = this.shade(token);
    span.style.background = hue && weight > 0 ? `rgba(var(--${hue}), calc(var(--weight) * ${Math.min(1, weight).toFixed(3)}))` : "";
    const clipped = this.coloring === "clipped" ? token.clipped : "";
    span.className = clipped || (!trained && this.coloring !== "logprob" && this.coloring !== "none" ? "untrained" : "");
  }

  /** [colour, strength from 0 to 1] of a token. */
  shade({ sampler, ratio, clipped, advantage }) {
    const sign = (value) => (value > 0 ? "positive" : "negative");
    switch (this.coloring) {
      case "logprob": return ["rare", -sampler / 6];
      case "ratio": return [sign(Math.log(ratio)), Math.abs(Math.log(ratio)) / Math.log1p(this.record.axes.clip_high || 0.2) || 0];
      case "clipped": return clipped ? [clipped === "high" ? "positive" : "negative", 1] : [null, 0];
      case "advantage": return [sign(advantage), Math.abs(advantage) / (this.record.spread || 1) || 0];
      default: return [null, 0];
    }
  }

  colorBy(name) {
    this.coloring = this.color.value = name;
    if (this.chosen >= 0) {
      const now = this.now;
      this.drawRollout();
      this.setToken(now);
    }
  }

  drawLegend() {
    const bar = (...colors) => make("span", { className: "bar", style: `background: linear-gradient(to right, ${colors.join(", ")})` });
    const full = (hue) => `rgba(var(--${hue}), var(--weight))`;
    const { clip_low, clip_high, clip } = this.record.axes;
    const bound = clip_high || 0.2;
    const spread = short(this.record.spread, 2);
    const parts = {
      logprob: ["probability 1", bar("transparent", full("rare")), "e⁻⁶ or less"],
      ratio: [short(1 / (1 + bound), 2), bar(full("negative"), "transparent", full("positive")), short(1 + bound, 3), "trainer's over sampler's probability, first pass; italics: not trained"],
      clipped: clip ? [`trainer's over sampler's probability is below 1 − ${clip_low} (dashed) or above 1 + ${clip_high} (solid), where the advantage pushes it`] : ["this run clips nothing"],
      advantage: [`−${spread}`, bar(full("negative"), "transparent", full("positive")), `+${spread}`, "of the whole completion; italics: not trained"],
      none: [],
    };
    this.legend.replaceChildren(...parts[this.coloring].map((part) => make("span", {}, part)));
  }

  drawMember(j, current) {
    const r = this.record;
    const about = `#${r.sample[j]}  reward ${short(r.reward[j])}  advantage ${short(r.advantage[j])}  ${r.length[j]} tokens`;
    const node = make("div", { className: "member", role: "button", tabIndex: 0, "aria-current": current },
      make("p", {}, about), this.drawTokens(j, SHOWN_IN_GROUP, false));
    const open = () => {
      const position = this.rows.indexOf(j);
      if (position >= 0) this.select(position);
      else this.setFilter({ step: [r.step[j], r.step[j]], group: r.text.group_id.at(r.group[j]) }).then(() => this.select(this.rows.indexOf(j)));
    };
    node.addEventListener("click", open);
    node.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      open();
    });
    return node;
  }

  moveToken(by) {
    if (this.chosen < 0 || !this.record.trainer) return;
    const last = Math.min(this.shown, this.record.length[this.rows[this.chosen]]) - 1;
    this.setToken(Math.min(last, Math.max(0, this.now + by)));
  }

  setToken(t) {
    this.tokensNode.querySelector(".now")?.classList.remove("now");
    this.now = t;
    if (t < 0 || !this.record.trainer) {
      this.readout.replaceChildren(make("span", { className: "loading" }, "point at a token, or press → for its numbers"));
      return;
    }
    const token = this.record.token(this.rows[this.chosen], t);
    const span = this.tokensNode.children[t];
    span.classList.add("now");
    span.scrollIntoView({ block: "nearest" });
    const trained = !Number.isNaN(token.trainer);
    const values = {
      token: `${t + 1}: ${JSON.stringify(token.text)}`, id: token.id, "log-probability": plain(token.sampler),
      "trainer's": trained ? plain(token.trainer) : "not trained", ratio: trained ? plain(token.ratio) : "–",
      clipped: trained ? token.clipped || "no" : "–", advantage: plain(token.advantage),
    };
    this.readout.replaceChildren(...Object.entries(values).map(([name, value]) => make("span", {}, make("i", {}, name), make("span", { "data-value": name }, String(value)))));
  }
}
