"use strict";
const plot = document.getElementById("plot"), view = plot.parentElement, shown = document.getElementById("shown");
const zoom = document.getElementById("zoom"), axis = plot.querySelector(".axis"), whole = Number(axis.dataset.ns);
function ticks(count) {
  const power = 10 ** Math.floor(Math.log10(whole / count));
  const step = power * [1, 2, 5, 10].find(m => count >= whole / (power * m));
  const marks = Array.from({ length: Math.ceil(whole / step) }, (_, i) => {
    const mark = document.createElement("span");
    mark.style.left = 100 * i * step / whole + "%";
    mark.textContent = Number((i * step / 1e6).toPrecision(9)) + " ms";
    return mark;
  });
  axis.replaceChildren(...marks);
}
function widen(power, at) {
  const old = plot.clientWidth, middle = (view.scrollLeft + at) / old;
  plot.style.width = 100 * 2 ** power + "%";
  view.scrollLeft = middle * plot.clientWidth - at;
  ticks(10 * 2 ** power);
}
zoom.addEventListener("input", () => widen(Number(zoom.value), view.clientWidth / 2));
view.addEventListener("wheel", event => {
  if (event.ctrlKey) {
    event.preventDefault();
    zoom.value = Number(zoom.value) - event.deltaY / 200;
    widen(Number(zoom.value), event.clientX - view.getBoundingClientRect().left);
  }
}, { passive: false });
plot.addEventListener("pointerover", event => {
  if (event.target.title) shown.textContent = event.target.title;
});
