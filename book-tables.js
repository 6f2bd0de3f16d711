// Lays out tables that are wider than the page, as on a phone, as lists: each cell on lines of its own, below the name of its
// column. `book.css` has the style.
(() => {
    const tables = [...document.querySelectorAll(".content table")];
    for (const table of tables) {
        const names = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
        for (const row of table.querySelectorAll("tbody tr"))
            [...row.cells].forEach((cell, column) => { cell.dataset.column = names[column] ?? ""; });
    }
    const layOut = () => {
        for (const table of tables) {
            table.classList.remove("is-list");
            const isTooWide = table.offsetWidth > table.parentElement.clientWidth;
            table.classList.toggle("is-list", isTooWide);
        }
    };
    layOut();
    addEventListener("resize", layOut);
})();
