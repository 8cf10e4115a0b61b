"use strict";
(() => {
  const main = document.querySelector("main");
  const state = document.getElementById("live");
  const source = new EventSource("events");
  source.addEventListener("message", (event) => {
    main.innerHTML = JSON.parse(event.data).html;
    state.textContent = `as of ${new Date().toLocaleTimeString()}`;
  });
  source.addEventListener("error", () => {
    state.textContent = "the command that served this page has ended; this is the last it said";
  });
})();
