"use strict";
const { texts, buffers, slots, ops, flights, cut } = JSON.parse(document.getElementById("data").textContent);
const [KIND, READS, WRITES, WHY, BYTES, LIVE, START, ATTRS] = [0, 1, 2, 3, 4, 5, 6, 7];
const number = (place) => (place < cut[0] || !cut[1] ? place : place + cut[1] - cut[0]);
const place = (op) => (op < cut[0] || !cut[1] ? op : op >= cut[1] ? op - cut[1] + cut[0] : -1);
const make = (tag, text, parent) => { const e = document.createElement(tag); e.textContent = text; parent.append(e); return e; };
const shown = document.getElementById("op"), found = document.getElementById("found");

function button(text, action, parent) { make("button", text, parent).onclick = action; }

function showOp(at) {
  const op = ops[at];
  shown.replaceChildren();
  make("strong", `op ${number(at)}: ${texts[op[KIND]]}`, shown);
  make("p", texts[op[WHY]] || "no reason is written", shown);
  for (const [name, list] of [["reads", op[READS]], ["writes", op[WRITES]]]) {
    const row = make("div", list.length ? `${name}: ` : "", shown);
    for (const b of list) button(`${buffers[b][0]} (${buffers[b][2].toLocaleString("en")} bytes)`, () => showBuffer(b), row);
  }
  const sent = op[BYTES] ? `sends or moves ${op[BYTES].toLocaleString("en")} bytes; ` : "";
  make("p", `${sent}live after it: ${op[LIVE].toLocaleString("en")} bytes. ${texts[op[ATTRS]]}`, shown).className = "note";
  const row = make("div", "", shown);
  if (at > 0) button("the op before", () => showOp(at - 1), row);
  if (at + 1 < ops.length) button("the op after", () => showOp(at + 1), row);
}

function list(title, places) {
  found.replaceChildren();
  make("strong", `${title}: ${places.length} ops`, found);
  for (const at of places.slice(0, 500)) {
    const op = ops[at], row = make("div", "", found);
    row.className = "row";
    button(`${number(at)} ${texts[op[KIND]]}`, () => showOp(at), row);
    row.append(texts[op[WHY]]);
  }
  if (places.length > 500) make("p", "The first 500 are shown.", found);
}

const touching = (wanted) => [...ops.keys()].filter((at) => [...ops[at][READS], ...ops[at][WRITES]].some((b) => wanted.has(b)));
function showBuffer(b) { list(`${buffers[b][0]}, ${buffers[b][1]}`, touching(new Set([b]))); }

function showBucket(name, title) {
  list(title, touching(new Set([...buffers.keys()].filter((b) => buffers[b][3] === name))));
}

function find(text) {
  if (/^\d+$/.test(text)) return place(+text) >= 0 && place(+text) < ops.length ? showOp(place(+text)) : undefined;
  const leaf = (path) => path === text || text.endsWith(`/${path}`);
  const bucket = Object.keys(slots).find((name) => slots[name].some(leaf));
  if (bucket) return showBucket(bucket, `${text}, in bucket ${bucket}`);
  const wanted = new Set([...buffers.keys()].filter((b) => buffers[b][0].includes(text)));
  list(`buffers with ${JSON.stringify(text)} in their name`, touching(wanted));
}

for (const svg of document.querySelectorAll("#schedule, #memory")) svg.addEventListener("click", (event) => {
  const box = svg.getBoundingClientRect(), across = svg.viewBox.baseVal.width;
  const x = ((event.clientX - box.left) / box.width) * across - svg.dataset.left;
  const time = (x / svg.dataset.width) * svg.dataset.whole;
  let at = 0;
  while (at + 1 < ops.length && ops[at + 1][START] <= time) at += 1;
  const lane = Math.floor((((event.clientY - box.top) / box.height) * svg.viewBox.baseVal.height) / svg.dataset.row);
  const flight = svg.id === "schedule" && flights.findLast(([op, wait, row]) =>
    row === lane && place(op) >= 0 && ops[place(op)][START] <= time && number(at) <= wait);
  showOp(lane && flight ? place(flight[0]) : at);
});
for (const slot of document.querySelectorAll(".slot"))
  slot.addEventListener("click", () => showBucket(slot.dataset.bucket, `bucket ${slot.dataset.bucket}`));
document.getElementById("find").addEventListener("change", (event) => find(event.target.value.trim()));
if (location.hash) find(decodeURIComponent(location.hash.slice(1)));
