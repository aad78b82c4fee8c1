"use strict";
const plot = document.getElementById("plot"), scroll = plot.parentElement, shown = document.getElementById("shown");
const zoom = document.getElementById("zoom"), axis = plot.querySelector(".axis"), whole = Number(axis.dataset.ns);
function text(ns) {
  return ns >= 1e9 ? (ns / 1e9).toFixed(3) + " s" : ns >= 1e6 ? (ns / 1e6).toFixed(2) + " ms" : (ns / 1e3).toFixed(1) + " µs";
}
function ticks(count) {
  const power = 10 ** Math.floor(Math.log10(whole / count));
  const step = power * [1, 2, 5, 10].find(m => count >= whole / (power * m));
  const marks = Array.from({ length: Math.ceil(whole / step) }, (_, i) => {
    const mark = document.createElement("span");
    mark.style.left = 100 * i * step / whole + "%";
    mark.textContent = i ? text(i * step) : "0";
    return mark;
  });
  axis.replaceChildren(...marks);
}
function widen(power, at) {
  const old = plot.clientWidth, middle = (scroll.scrollLeft + at) / old;
  plot.style.width = 100 * 2 ** power + "%";
  scroll.scrollLeft = middle * plot.clientWidth - at;
  ticks(10 * 2 ** power);
}
zoom.addEventListener("input", () => widen(Number(zoom.value), scroll.clientWidth / 2));
scroll.addEventListener("wheel", event => {
  if (event.ctrlKey) {
    event.preventDefault();
    zoom.value = Number(zoom.value) - event.deltaY / 200;
    widen(Number(zoom.value), event.clientX - scroll.getBoundingClientRect().left);
  }
}, { passive: false });
plot.addEventListener("pointerover", event => {
  if (event.target.title) shown.textContent = event.target.title;
});
