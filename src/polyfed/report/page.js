"use strict";
// A click on a heading sorts its table by that column: numbers fall first, words rise; what has no number stays last.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, at) => {
    const isWords = head.classList.contains("words");
    let direction = isWords ? -1 : 1;
    const order = (row) => (isWords ? row.cells[at].textContent : Number(row.cells[at].dataset.order));
    const compare = (a, b) => {
      if (isWords) return direction * order(a).localeCompare(order(b), "en", { numeric: true });
      if (isNaN(order(a)) || isNaN(order(b))) return isNaN(order(a)) - isNaN(order(b));
      return direction * (order(a) - order(b));
    };
    head.firstChild.addEventListener("click", () => {
      direction = -direction;
      body.append(...[...body.rows].sort(compare));
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction < 0 ? "descending" : "ascending");
    });
  });
}
